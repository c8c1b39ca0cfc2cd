"""Faults, each for real: struck while a case is timed, timed until its result is there, and nothing left of it."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness import runner
from harness.case import Case, Measurement, Suite
from harness.engines import Engine, place
from harness.layout import Layout
from harness.progress import SilentProgress
from harness.result import Result
from harness.topology import Topology

FAULTY = Path(__file__).parents[1] / "harness" / "launch" / "faulty.py"
_STEPS_BEFORE = 5  # of the timed window, when the fault strikes
_GONE_SECONDS = 10.0

Strike = Callable[["Struck"], None]
_table: list[tuple[str, str, float | None, float | None]] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table of README."""
    if not _table:
        return
    terminalreporter.write_sep("-", "time from the fault to the case's result")
    terminalreporter.write_line("| fault | what the result says | seconds | bound |")
    terminalreporter.write_line("|---|---|---:|---:|")
    for fault, told, seconds, bound in _table:
        shown = ["-" if value is None else f"{value:.1f}" for value in (seconds, bound)]
        terminalreporter.write_line(f"| {fault} | {told} | {shown[0]} | {shown[1]} |")


def record(fault: str, told: str, seconds: float | None = None, bound_seconds: float | None = None) -> None:
    """A line of the table. The time has to be within its bound."""
    _table.append((fault, told, seconds, bound_seconds))
    if seconds is not None and bound_seconds is not None:
        assert seconds <= bound_seconds, f"{fault}: {seconds:.1f} s, expected at most {bound_seconds:g} s"


def writers_to(directory: Path) -> dict[int, str]:
    """The processes whose output goes into `directory`: ranks and agents, by number, with the name of their log."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            target = path.readlink()
        except OSError:
            continue
        if target.is_relative_to(directory):
            found[int(path.parts[2])] = f"{target.parent.name}/{target.name}"
    return found


def rank_pid(directory: Path, rank: int, launch: str = "timed") -> int:
    """The process of a rank that is being measured with results in `directory`."""
    return next(pid for pid, log in writers_to(directory).items() if log == f"{launch}/rank-{rank}.log")


def holders(pid: int) -> set[int]:
    """The processes that hold namespaces of emulated nodes for the process `pid`: its children, and theirs."""
    found, open_ends = set(), [pid]
    while open_ends:
        try:
            listed = Path(f"/proc/{open_ends.pop()}/task").glob("*/children")
            children = [int(word) for each in listed for word in each.read_text().split()]
            open_ends += children
            found |= {child for child in children if Path(f"/proc/{child}/comm").read_text().strip() == "cat"}
        except OSError:
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"{what} within {seconds:g} s"
        time.sleep(0.05)


@dataclass(kw_only=True)
class Struck(SilentProgress):
    """A suite under way. `strike` happens once, a moment after the first case's timing has begun."""

    directory: Path
    strike: Strike
    struck_at: float = 0.0
    seconds: float | None = None  # from the fault to the first result
    results: list[Result] = field(default_factory=list)
    error: BaseException | None = None
    _thread: threading.Thread | None = None

    def phase(self, case: Case, text: str, done: int, total: int) -> None:
        if text == "timing" and self._thread is None:
            self._thread = threading.Thread(target=self._do, args=(self._num_steps(),), daemon=True)
            self._thread.start()

    def case_finished(self, result: Result) -> None:
        if not self.results:
            self.seconds = time.monotonic() - self.struck_at
        self.results.append(result)

    def _num_steps(self) -> int:
        """As `faulty.Unhurried` writes them down."""
        logs = (self.directory / "logs").glob("*/timed/rank-1.log")
        return sum(path.read_text().count("step\n") for path in logs)

    def _do(self, num_steps_before: int) -> None:
        try:
            # What a window needs is made before its first step.
            until(lambda: self._num_steps() > num_steps_before + _STEPS_BEFORE, 60.0, "the ranks train")
            self.struck_at = time.monotonic()
            self.strike(self)
        except BaseException as error:
            self.error = error

    def pid(self, rank: int) -> int:
        return rank_pid(self.directory, rank)


Outcome = tuple[Result, float]
Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a case that a fault strikes, and a sound one after it; the first one's result, and the seconds from the
    fault to it. Afterwards nothing may be left: no process (with it goes the memory that ranks share, which has no
    name), no namespace, no temporary file."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def strike_and_run(case: Case, strike: Strike, *, engine: Engine | None = None) -> Outcome:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        progress = Struck(directory=tmp_path / "results", strike=strike)
        suite = Suite(name="faults", cases=(case, sound(case.topology)))
        suite = suite if engine is None else place(suite, engine)
        struck, after = runner.run(suite, tmp_path / "results", progress=progress, engine=engine)
        if progress.error is not None:
            raise progress.error
        assert progress.struck_at, f"never struck: {struck.status}, {struck.reason}"
        assert (after.status, after.reason) == ("ok", None), "the next case"
        assert "\n" not in (struck.reason or "")
        assert progress.seconds is not None
        return struck, progress.seconds

    yield strike_and_run
    until(lambda: not writers_to(tmp_path), _GONE_SECONDS, "every process is gone")
    until(lambda: not holders(os.getpid()), _GONE_SECONDS, "every namespace is gone")
    # The fork server's sockets, which it keeps, and torch's own cache.
    kept = {path for path in temporary.iterdir() if list(path.glob("listener-*")) or "torchinductor" in path.name}
    assert set(temporary.iterdir()) == kept
    assert not list(tmp_path.rglob("rendezvous-*"))


def victim(
    implementation: str = f"{FAULTY}:Unhurried",
    *,
    timed_steps: int = 1000,
    topology: Topology | None = None,
    **fields: Any,
) -> Case:
    """A case whose one timed window is long enough for anything to happen in it."""
    values = {
        "workload": "gpt:size=tiny",
        "implementation": implementation,
        "layout": Layout(data=2 if topology is None else topology.world_size),
        "topology": topology,
        "measurement": Measurement(
            parity_steps=3, warm_up_steps=3, timed_steps=timed_steps, communication_steps=0, memory_steps=0
        ),
        "deadline_seconds": 240.0,
    }
    return Case(**(values | fields))


def sound(topology: Topology | None) -> Case:
    measurement = Measurement(parity_steps=3, timed_steps=0, communication_steps=0, memory_steps=0)
    return victim("native.ddp", topology=topology, measurement=measurement)


def faulty(fault: str, **fields: Any) -> Case:
    """A case of one of the implementations that go wrong."""
    measurement = Measurement(parity_steps=0, timed_steps=1000, communication_steps=0, memory_steps=0)
    return victim(
        f"{FAULTY}:{fault}", workload="awkward:kind=unequal_tokens", **({"measurement": measurement} | fields)
    )
