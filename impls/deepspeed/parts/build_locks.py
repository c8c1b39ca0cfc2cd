"""Locks that torch's builds of extensions leave behind: whoever wants the extension waits for one for ever.

torch makes the file `lock` beside an extension, keeps it open while it builds or looks whether it has to, and removes
it. A process that is killed meanwhile, even a rank that finds everything built, removes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch.utils.cpp_extension as extensions

_FRESH_SECONDS = 5.0  # a lock so young may be just made, or just about to go
_POLL_SECONDS = 0.2


def abandoned_lock(names: Sequence[str]) -> Path | None:
    """The lock of one of these extensions that no process of this machine has open any more, or None. It is not ours to
    remove: the directory may be shared with machines whose processes are not seen here."""
    for name in names:
        lock = Path(extensions._get_build_directory(name, False)) / "lock"
        if _is_abandoned(lock):
            return lock
    return None


def _is_abandoned(lock: Path) -> bool:
    """Waits out a lock that is too young to tell."""
    while (made := _made(lock)) is not None:
        if _is_open(lock):
            return False
        if time.time() - made > _FRESH_SECONDS and _made(lock) == made:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _made(lock: Path) -> float | None:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:
        return None


def _is_open(lock: Path) -> bool:
    """Whether a process has it open; where there is no /proc to ask, that is assumed."""
    processes = Path("/proc")
    if not (processes / "self/fd").is_dir():
        return True
    path = os.path.realpath(lock)
    for process in processes.glob("[0-9]*"):
        try:
            if any(os.path.realpath(descriptor) == path for descriptor in (process / "fd").iterdir()):
                return True
        except OSError:  # it has ended, or is someone else's
            continue
    return False
