"""Resident memory as the operating system counts it."""

import mmap

from harness.measure.resident import peak_resident_bytes, reset_peak_resident_bytes


def test_the_peak_holds_what_was_touched_and_has_gone() -> None:
    num_bytes = 64 << 20
    reset_peak_resident_bytes()
    before = peak_resident_bytes()
    with mmap.mmap(-1, num_bytes) as pages:
        pages.write(b"x" * num_bytes)
    after = peak_resident_bytes()
    assert after >= before + num_bytes // 2
    reset_peak_resident_bytes()
    assert peak_resident_bytes() <= after
