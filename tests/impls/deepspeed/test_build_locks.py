"""A lock that keeps everyone waiting is told from one that somebody holds. Needs no DeepSpeed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from impls.deepspeed.parts import build_locks, library


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch would put the lock of DeepSpeed's first extension."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / "deepspeed_shm_comm/lock"


def leave(lock: Path, *, seconds_ago: float) -> None:
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    then = time.time() - seconds_ago
    os.utime(lock, (then, then))


def test_no_lock(lock: Path) -> None:
    assert build_locks.abandoned_lock(["deepspeed_shm_comm"]) is None


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux tells who has a file open")
def test_what_a_killed_process_has_left_is_named_before_anyone_waits_for_it(lock: Path) -> None:
    leave(lock, seconds_ago=60)
    assert build_locks.abandoned_lock(["cpu_adam", "deepspeed_shm_comm"]) == lock
    expected = f"cannot compile ShareMemCommBuilder: nobody holds {lock} any more: remove it"
    with pytest.raises(RuntimeError, match=expected):
        library.compile_for_ranks()


def test_what_somebody_builds_is_waited_for(lock: Path) -> None:
    leave(lock, seconds_ago=60)
    with lock.open():
        assert build_locks.abandoned_lock(["deepspeed_shm_comm"]) is None


def test_a_lock_that_is_about_to_go_is_not_taken_for_abandoned(lock: Path) -> None:
    leave(lock, seconds_ago=0)
    release = threading.Timer(0.3, lock.unlink)
    release.start()
    assert build_locks.abandoned_lock(["deepspeed_shm_comm"]) is None
    release.join()
