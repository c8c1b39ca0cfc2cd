"""The implementations under test: one file each, found by name (`native.ddp` is `impls/native/ddp.py`)."""
