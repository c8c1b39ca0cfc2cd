"""Ranks that are killed, stopped, raise, run out of memory or become slow while they are timed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness import report
from harness.launch.timeouts import BARRIER_SECONDS, ON_ONE_MACHINE
from harness.measure import straggler
from tests.faults.conftest import Run, Struck, faulty, record, victim

pytestmark = pytest.mark.faults

_CGROUPS = Path("/sys/fs/cgroup")
_LIMIT_BYTES = 600 * 2**20
_UNNOTICED = ON_ONE_MACHINE.least_seconds + BARRIER_SECONDS  # by a rank that waits in a collective


def test_a_rank_that_is_killed_in_a_step(run: Run) -> None:
    result, seconds = run(victim(), lambda struck: os.kill(struck.pid(1), signal.SIGKILL))
    assert (result.status, result.culprit) == ("failed", 1)
    assert (result.reason or "").startswith("rank 1 was killed by SIGKILL during time_steps (timing 0/")
    record("kill -9 of a rank in a step", "failed: rank 1 was killed by SIGKILL", seconds, 5.0)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_is_stopped(rank: int, run: Run) -> None:
    result, seconds = run(victim(), lambda struck: os.kill(struck.pid(rank), signal.SIGSTOP))
    assert (result.status, result.culprit) == ("timed out", rank)
    assert (result.reason or "").startswith(f"rank {rank} is stopped: in time_steps (timing 0/")
    record(f"SIGSTOP of rank {rank}", f"timed out: rank {rank} is stopped", seconds, _UNNOTICED + 15.0)


def test_a_rank_that_raises(run: Run) -> None:
    result, seconds = run(faulty("RaisesOnceAsked"), lambda struck: os.kill(struck.pid(1), signal.SIGUSR2))
    assert (result.status, result.culprit) == ("failed", 1)
    assert result.reason == "rank 1: ValueError: the third bucket is empty"
    assert "in go_wrong" in (result.traceback or "")
    record("a rank raises", "failed: rank 1: ValueError: ...", seconds, 5.0)


def test_a_rank_that_hangs(run: Run) -> None:
    result, seconds = run(faulty("HangsOnceAsked"), lambda struck: os.kill(struck.pid(1), signal.SIGUSR2))
    # The faulty implementation takes no parity steps; its warm-up has told how long a step is.
    assert (result.status, result.culprit) == ("timed out", 1)
    assert (result.reason or "").startswith("rank 1 hangs: in time_steps")
    assert "in go_wrong" in (result.traceback or "")
    record("a rank hangs", "timed out: rank 1 hangs", seconds, _UNNOTICED + 15.0)


@pytest.fixture
def limited() -> Iterator[Path]:
    """A cgroup that may take little memory; the file that takes processes in."""
    for directory, limit in ((_CGROUPS / "memory", "memory.limit_in_bytes"), (_CGROUPS, "memory.max")):
        group = directory / f"meshmark-faults-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(_LIMIT_BYTES))
                yield group / "cgroup.procs"
            finally:
                for _ in range(100):
                    with suppress(OSError):
                        group.rmdir()
                        break
                    time.sleep(0.1)
            return
    pytest.skip("memory cgroups cannot be made here")


def test_a_rank_that_the_system_kills_for_memory(run: Run, limited: Path) -> None:
    def strike(struck: Struck) -> None:
        limited.write_text(str(struck.pid(1)))
        os.kill(struck.pid(1), signal.SIGUSR2)

    result, seconds = run(faulty("GrowsOnceAsked"), strike)
    assert (result.status, result.culprit) == ("out of memory", 1), result.reason
    assert (result.reason or "").startswith("rank 1 was killed by the system, which ran out of memory")
    record("a rank outgrows its cgroup", "out of memory: rank 1 was killed by the system", seconds, 20.0)


def test_a_rank_that_cannot_allocate(run: Run) -> None:
    result, seconds = run(faulty("OutgrowsItsLimitOnceAsked"), lambda s: os.kill(s.pid(1), signal.SIGUSR2))
    assert (result.status, result.culprit) == ("out of memory", 1)
    record("a rank cannot allocate (rlimit)", "out of memory: rank 1: RuntimeError: ...", seconds, 5.0)


def test_a_slow_rank_is_named_and_is_no_error(run: Run) -> None:
    """It runs for 10 ms of every 50."""

    def slow(pid: int) -> None:
        with suppress(ProcessLookupError):
            while True:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.04)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)

    def strike(struck: Struck) -> None:
        threading.Thread(target=slow, args=(struck.pid(1),), daemon=True).start()

    result, _ = run(victim(timed_steps=60), strike)
    assert (result.status, result.reason, result.culprit) == ("ok", None, None)
    found = straggler.find(result.samples["fixed_work_seconds"])
    assert found is not None
    assert found.rank == 1
    assert 0.05 < found.speed < 0.45
    assert str(found) in report.markdown([result], [], Path("results"))
    record("a rank slowed to 20 %", f"ok, and {str(found).partition(',')[0]}")
