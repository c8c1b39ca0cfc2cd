"""The peak of the process's resident memory, as the operating system counts it.

It holds what no allocator of torch tells: libraries, mappings once touched, freed memory that malloc keeps. It lacks
what was allocated but never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # man 5 proc: resets VmHWM to the current resident size


def reset_peak_resident_bytes() -> None:
    """Starts the peak anew, where the system allows it; elsewhere it stays the peak of the whole process."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)


def peak_resident_bytes() -> int:
    """The most bytes resident since the last reset."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def give_back_freed_memory() -> None:
    """Has the C library hand memory that is free back to the system, where it can: glibc keeps it otherwise."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
