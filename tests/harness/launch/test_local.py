"""Ranks that fail in every way: the culprit is named, nothing is left behind, and the next launch is sound."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.case import Case
from harness.launch import local
from harness.launch.failure import LaunchFailed
from harness.launch.local import LocalLaunch
from harness.launch.timeouts import Timeouts
from harness.layout import Layout

FAULTY = Path(__file__).with_name("faulty.py")
WORKLOAD = "awkward:kind=unequal_tokens"
ROOT = Path(__file__).resolve().parents[3]


def launch(fault: str, directory: Path, world_size: int = 2) -> LocalLaunch:
    case = Case(workload=WORKLOAD, implementation=f"{FAULTY}:{fault}", layout=Layout(data=world_size))
    return LocalLaunch(case.to_json(), world_size, directory, deadline_seconds=60.0)


def living(sessions: Iterable[int]) -> list[int]:
    """The processes of these sessions, but for those that only wait to be reaped."""
    found, wanted = [], set(sessions)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if state != "Z" and (int(session) in wanted or int(path.parent.name) in wanted):
            found.append(int(path.parent.name))
    return found


def until_gone(pids: list[int], seconds: float) -> list[int]:
    until = time.monotonic() + seconds
    while (left := living(pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def failure_of(
    fault: str,
    directory: Path,
    *,
    command: str = "time_steps",
    world_size: int = 2,
    seconds_to_train: float | None = None,
    meddle: Callable[[list[int]], None] | None = None,
) -> LaunchFailed:
    """How a launch of `fault` ends. `meddle` gets the ranks' numbers once they train; `seconds_to_train` is what is
    left to them of the deadline then, however long a busy machine took to start them."""
    arguments: dict[str, Any] = {"num_steps": 100 if meddle else 3}
    if command == "parity":
        arguments["path"] = str(directory / "tensors.pt")
    with launch(fault, directory, world_size) as ranks:
        pids = ranks.pids
        with pytest.raises(LaunchFailed) as raised:
            ranks.command("build")
            if seconds_to_train is not None:
                ranks._seconds_left = seconds_to_train
            if meddle:
                threading.Timer(0.7, meddle, [pids]).start()
            ranks.command(command, **arguments)
        assert until_gone(pids, 1.0) == []
    assert "\n" not in raised.value.reason
    assert not list(directory.glob("rendezvous*"))
    return raised.value


def sound(directory: Path, world_size: int = 2) -> None:
    with launch("Sound", directory, world_size) as ranks:
        pids = ranks.pids
        ranks.command("build")
        answers = ranks.command("time_steps", num_steps=3)
    assert [len(answer["step_seconds"]) for answer in answers] == [3] * world_size
    assert living(pids) == []


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        ("Raises", "rank 1: ValueError: the third bucket", 'raise ValueError("the third bucket'),
        ("RaisesEndOfFile", "rank 1: EOFError: ran out of input", "in go_wrong"),
        ("TellsLate", "rank 1: ValueError: the third bucket is empty", "in go_wrong"),
        ("LeavesWithThree", "rank 1 left with exit code 3 and no record during time_steps (timing 0/1)", None),
        ("LeavesWithZero", "rank 1 left with exit code 0 and no record during time_steps (timing 0/1)", "last words"),
        ("Exits", "rank 1: SystemExit: 0", "in go_wrong"),
        ("LeavesAChild", "rank 1 left with exit code 3 and no record during time_steps (timing 0/1)", None),
        ("BuildFails", "rank 1: FileNotFoundError: shard-1.pt is missing", "in __init__"),
    ],
)
def test_the_rank_that_failed_first_is_named(fault: str, reason: str, words: str | None, tmp_path: Path) -> None:
    began = time.monotonic()
    failure = failure_of(fault, tmp_path, world_size=3)
    assert time.monotonic() - began < 20
    assert (failure.status, failure.culprit, failure.reason) == ("failed", 1, reason)
    if words is not None:
        assert words in (failure.traceback or "")


def test_the_next_launch_is_sound_in_the_same_directory(tmp_path: Path) -> None:
    failure_of("LeavesWithThree", tmp_path)
    sound(tmp_path)


@pytest.mark.parametrize("fault", ["OutgrowsItsLimit", "RunsOutOfMemory"])
def test_out_of_memory_is_a_status_of_its_own(fault: str, tmp_path: Path) -> None:
    failure = failure_of(fault, tmp_path)
    assert (failure.status, failure.culprit) == ("out of memory", 1)
    assert "in go_wrong" in (failure.traceback or "")


def test_an_answer_that_cannot_be_sent_is_a_failure(tmp_path: Path) -> None:
    failure = failure_of("Unpicklable", tmp_path, command="parity")
    assert (failure.status, failure.culprit) == ("failed", 1)
    assert "pickle" in failure.reason


def test_a_rank_killed_from_outside(tmp_path: Path) -> None:
    failure = failure_of("Slow", tmp_path, meddle=lambda pids: os.kill(pids[1], signal.SIGKILL))
    assert (failure.status, failure.culprit) == ("failed", 1)
    assert failure.reason == "rank 1 was killed by SIGKILL during time_steps (timing 0/1)"


def test_megabytes_of_output_go_to_the_ranks_own_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with launch("Talks", tmp_path) as ranks:
        ranks.command("build")
        ranks.command("time_steps", num_steps=3)
    assert (tmp_path / "rank-1.log").stat().st_size > 4e6
    assert (tmp_path / "rank-0.log").stat().st_size < 1e5
    assert capfd.readouterr() == ("", "")


def test_the_deadline_names_the_rank_the_others_wait_for(tmp_path: Path) -> None:
    def late(fault: str) -> LaunchFailed:
        return failure_of(fault, tmp_path / fault, world_size=3, seconds_to_train=4.0)

    faults = ["Hangs", "HangsInBackward", "Stops", "Mismatched"]
    began = time.monotonic()
    with ThreadPoolExecutor(len(faults)) as pool:
        hangs, in_backward, stops, mismatched = pool.map(late, faults)
    assert time.monotonic() - began < 30
    assert {failure.status for failure in (hangs, in_backward, stops, mismatched)} == {"timed out"}
    assert (hangs.culprit, in_backward.culprit, stops.culprit) == (1, 1, 1)
    assert hangs.reason.startswith("rank 1 hangs: no answer to time_steps within the deadline of 60 s (rank 0 timing")
    assert "in go_wrong" in (hangs.traceback or "")
    assert "in hook" in (in_backward.traceback or "")
    assert stops.reason.startswith("rank 1 is stopped")
    assert mismatched.culprit is None
    assert mismatched.reason.startswith("every rank waits for another")
    assert "in recv" in (mismatched.traceback or "")


def test_ranks_that_wait_in_vain_find_out_who_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the deadline; the first step of the warm-up tells how long a step is."""
    monkeypatch.setattr(local, "ON_ONE_MACHINE", Timeouts(least_seconds=3.0))

    def missed(fault: str) -> LaunchFailed:
        return failure_of(fault, tmp_path / fault, command="warm_up", world_size=3)

    faults = ["Hangs", "Stops", "Mismatched"]
    began = time.monotonic()
    with ThreadPoolExecutor(len(faults)) as pool:
        hangs, stops, mismatched = pool.map(missed, faults)
    assert time.monotonic() - began < 40
    assert {failure.status for failure in (hangs, stops, mismatched)} == {"timed out"}
    assert (hangs.culprit, stops.culprit, mismatched.culprit) == (1, 1, None)
    assert re.match(r"rank 1 hangs: in warm_up \(warming up 1/3\) rank [02] gave up: RuntimeError: ", hangs.reason)
    assert "in go_wrong" in (hangs.traceback or "")
    assert stops.reason.startswith("rank 1 is stopped: in warm_up")
    assert mismatched.reason.startswith("every rank waits for another: in warm_up")
    assert "in recv" in (mismatched.traceback or "")


def test_the_deadline_bounds_all_commands_together_and_spares_the_time_between(tmp_path: Path) -> None:
    with launch("Slow", tmp_path) as ranks:
        ranks.command("build")
        ranks._seconds_left = 3.0
        time.sleep(3.2)
        ranks.command("time_steps", num_steps=2)
        with pytest.raises(LaunchFailed, match="no answer to time_steps within the deadline"):
            for _ in range(3):
                ranks.command("time_steps", num_steps=2)


def test_a_command_may_have_a_deadline_of_its_own(tmp_path: Path) -> None:
    with launch("Slow", tmp_path) as ranks:
        ranks.command("build")
        ranks.command("time_steps", within_seconds=30.0, num_steps=2)
        with pytest.raises(LaunchFailed, match=r"no answer to time_steps within the deadline of 1\.5 s"):
            ranks.command("time_steps", within_seconds=1.5, num_steps=50)


def test_many_launches_at_once_do_not_meet_each_other(tmp_path: Path) -> None:
    main = sys.modules["__main__"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: sound(tmp_path / str(index)), range(16)))
    assert sys.modules["__main__"] is main


_PARENT = """
import sys
from pathlib import Path
from tests.harness.launch.test_local import launch

with launch(sys.argv[1], Path(sys.argv[2])) as ranks:
    ranks.command("build")
    print(*ranks.pids, flush=True)
    ranks.command("time_steps", num_steps=3)
"""


def test_no_rank_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Whether a rank hangs or is stopped when it happens."""
    kinds = [("Hangs", signal.SIGTERM), ("Stops", signal.SIGKILL)]
    parents = [
        subprocess.Popen(
            [sys.executable, "-c", _PARENT, fault, str(tmp_path / f"{fault}-{number}")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        for fault, number in kinds
    ]
    everybody: list[int] = []
    for parent, (_, number) in zip(parents, kinds, strict=True):
        with parent:
            assert parent.stdout is not None
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(living(pids)) == 2
            time.sleep(0.3)
            parent.send_signal(number)
            assert parent.wait(10) == -number
        everybody += [parent.pid, *pids]
    assert until_gone(everybody, 10.0) == []
