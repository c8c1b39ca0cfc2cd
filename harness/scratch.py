"""Temporary directories that end with the process that made them, however that ends: each holds a locked file, and
whoever makes the next one sweeps those whose lock nobody holds any more."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process
from pathlib import Path

_PREFIX = "meshmark-"
_LOCK_FILE = ".in-use"
_LONGEST_NAME_OF_A_SOCKET = 107  # bytes, on Linux
_NAME_WITHIN = len(f"/{_PREFIX}12345678/listener-12345678")
_SHORT = Path("/tmp")


@contextmanager
def directory(place: Path | None = None) -> Iterator[Path]:
    """A new directory in `place`, by default among the system's temporary ones; gone afterwards."""
    made, lock = _make(place or Path(tempfile.gettempdir()))
    try:
        yield made
    finally:
        _remove(made, lock)


def place_sockets() -> None:
    """Has this process' multiprocessing put its sockets into a directory of ours, under a name that is short enough for
    them, until the process ends. OSError where there is no such place."""
    # Where multiprocessing looks for its directory, and children inherit it from; there is no public way to name one.
    settings = process.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" in settings:
        return
    place = Path(tempfile.gettempdir())
    if len(os.fsencode(place)) + _NAME_WITHIN > _LONGEST_NAME_OF_A_SOCKET:
        if not os.access(_SHORT, os.W_OK):
            room = _LONGEST_NAME_OF_A_SOCKET - _NAME_WITHIN
            raise OSError(f"TMPDIR: expected a path of at most {room} bytes, or {_SHORT} to be writable, got {place}")
        place = _SHORT
    made, lock = _make(place)
    settings["tempdir"] = str(made)
    atexit.register(_remove, made, lock)


def _make(place: Path) -> tuple[Path, int]:
    """A directory, and the open file that locks it."""
    _sweep(place)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    # Locked before it has its name: nobody may find it free.
    new = made / f"{_LOCK_FILE}.new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # some network file systems have no locks; nothing is swept there
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(made / _LOCK_FILE)
    return made, lock


def _remove(made: Path, lock: int) -> None:
    shutil.rmtree(made, ignore_errors=True)
    with suppress(OSError):
        os.close(lock)


def _sweep(place: Path) -> None:
    """Removes what a killed process has left in `place`."""
    for lock_file in place.glob(f"{_PREFIX}*/{_LOCK_FILE}"):
        with suppress(OSError):
            lock = os.open(lock_file, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody is in there
                shutil.rmtree(lock_file.parent, ignore_errors=True)
            finally:
                os.close(lock)
