"""Micro-benchmarks: one mechanism each, apart from any training; `nox -s micro`."""
