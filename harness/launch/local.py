"""The local launcher: one process per rank on this machine.

Ranks are forked from a server that has torch loaded, so a world starts in a second and inherits nothing of the
parent's state. A rank belongs to its own session, writes to its own log, and dies with the server, which dies with the
parent: however the harness ends, no rank outlives it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.environment import MALLOC_SETTINGS
from harness.result import Status

_GRACE_SECONDS = 1.0  # after the first failure, for the other ranks' own reports
_EXIT_SECONDS = 5.0

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank is told when it starts; `directory` is shared by the ranks of a launch."""

    case: dict[str, Any]
    rank: int
    directory: Path
    weights: Path | None
    device: str
    threads: int
    instrumented: bool
    timeout_seconds: float


class LaunchFailed(Exception):
    """A launch ended early. `culprit` is the rank that failed first, `traceback` its own words."""

    def __init__(self, status: Status, reason: str, culprit: int | None = None, traceback: str | None = None) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason
        self.culprit = culprit
        self.traceback = traceback


@dataclass(kw_only=True)
class _Rank:
    process: Any
    channel: connection.Connection
    log: Path
    doing: str = "starting"
    answer: Any = None
    answered: bool = False
    failure: dict[str, Any] = field(default_factory=dict)


class LocalLaunch:
    """The ranks of one case, waiting for commands. Use as a context manager: leaving it ends every rank."""

    def __init__(
        self,
        case: dict[str, Any],
        world_size: int,
        directory: Path,
        *,
        weights: Path | None = None,
        device: str = "cpu",
        threads: int = 1,
        instrumented: bool = False,
        deadline_seconds: float = 300.0,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._deadline_seconds = deadline_seconds
        self._deadline = time.monotonic() + deadline_seconds
        self._ranks: list[_Rank] = []
        context = _server()
        from harness.worker import main

        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                job = Job(
                    case=case,
                    rank=rank,
                    directory=directory,
                    weights=weights,
                    device=device,
                    threads=threads,
                    instrumented=instrumented,
                    timeout_seconds=deadline_seconds,
                )
                process = context.Process(target=main, args=(there, job), name=f"meshmark rank {rank}", daemon=True)
                with _without_main_module():
                    process.start()
                there.close()
                self._ranks.append(_Rank(process=process, channel=here, log=directory / f"rank-{rank}.log"))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> LocalLaunch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def extend_deadline(self) -> None:
        """Starts the deadline anew: a launch of an interleaved group waits while others have their turn."""
        self._deadline = time.monotonic() + self._deadline_seconds

    def command(self, name: str, on_progress: OnProgress | None = None, **arguments: Any) -> list[Any]:
        """Has every rank carry out the worker's command `name`; their answers in rank order. LaunchFailed as soon as a
        rank raises, dies or leaves without an answer, or when the deadline has passed."""
        for rank in self._ranks:
            rank.answered = False
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end shows below, with its exit code
                rank.channel.send((name, arguments))
        while not all(rank.answered for rank in self._ranks):
            self._receive(name, on_progress)
        return [rank.answer for rank in self._ranks]

    def close(self) -> None:
        """Lets the ranks leave in order; ends those that do not."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.channel.send(("exit", {}))
        until = time.monotonic() + _EXIT_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends every rank and whatever it started, at once."""
        for rank in self._ranks:
            _kill_session(rank.process.pid)
        for rank in self._ranks:
            rank.process.join(_EXIT_SECONDS)
            rank.channel.close()

    def _receive(self, name: str, on_progress: OnProgress | None) -> None:
        """Takes in whatever ranks have to say next."""
        waiting = [rank for rank in self._ranks if not rank.answered]
        by_handle: dict[Any, _Rank] = {rank.channel: rank for rank in waiting}
        by_handle |= {rank.process.sentinel: rank for rank in self._ranks}
        ready = connection.wait(list(by_handle), timeout=max(0.0, self._deadline - time.monotonic()))
        if not ready:
            self._fail_late(name)
        for handle in ready:
            rank = by_handle[handle]
            if self._take_messages(rank, on_progress):
                self._fail(name)
            if not rank.answered and not rank.process.is_alive():
                self._take_messages(rank, on_progress)
                if not rank.answered:
                    self._fail(name)
        if any(not rank.process.is_alive() for rank in self._ranks):
            self._fail(name)

    def _take_messages(self, rank: _Rank, on_progress: OnProgress | None) -> bool:
        """Reads what `rank` has sent; True if it reports a failure."""
        try:
            while rank.channel.poll():
                kind, content = rank.channel.recv()
                if kind == "failed":
                    rank.failure = content
                    return True
                if kind == "answer":
                    rank.answer, rank.answered = content, True
                    return False
                rank.doing = f"{content[0]} {content[1]}/{content[2]}"
                if on_progress is not None and rank is self._ranks[0]:
                    on_progress(*content)
        except (EOFError, OSError):
            pass
        return False

    def _fail(self, name: str) -> None:
        """Waits a moment for the others' reports, then names the first culprit: a rank that died before one that raised
        (peers of a dead rank raise at once), the earliest of those that raised."""
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until and not all(r.failure or not r.process.is_alive() for r in self._ranks):
            for rank in self._ranks:
                self._take_messages(rank, None)
            time.sleep(0.02)
        for rank in self._ranks:
            self._take_messages(rank, None)
        died = [i for i, r in enumerate(self._ranks) if not r.failure and not r.process.is_alive()]
        raised = sorted((i for i, r in enumerate(self._ranks) if r.failure), key=lambda i: self._ranks[i].failure["at"])
        self._end_all()
        if died:
            culprit = min(died, key=lambda i: -int((self._ranks[i].process.exitcode or 0) < 0))
            rank = self._ranks[culprit]
            code = rank.process.exitcode or 0
            how = f"was killed by {_signal_name(-code)}" if code < 0 else f"left with exit code {code} and no record"
            reason = f"rank {culprit} {how} during {name} ({rank.doing})"
            raise LaunchFailed("failed", reason, culprit, _tail(rank.log))
        culprit = raised[0]
        failure = self._ranks[culprit].failure
        status: Status = "out of memory" if failure["out_of_memory"] else "failed"
        raise LaunchFailed(status, f"rank {culprit}: {failure['error']}", culprit, failure["traceback"])

    def _fail_late(self, name: str) -> None:
        """The deadline has passed: finds out which rank the others wait for."""
        states = [_process_state(rank.process.pid) for rank in self._ranks]
        stacks = self._stacks()
        silent = [i for i, rank in enumerate(self._ranks) if not rank.answered]
        stopped = [i for i in silent if states[i] == "T"]
        busy = [i for i in silent if stacks[i] and not _waits_for_peers(stacks[i])]
        culprit = next(iter(stopped or busy or silent), None)
        doing = "; ".join(f"rank {i} {self._ranks[i].doing}" for i in silent)
        why = "" if culprit is None else f"; rank {culprit} {'is stopped' if stopped else 'is the one to look at'}"
        self._end_all()
        raise LaunchFailed(
            "timed out",
            f"no answer to {name} within the deadline of {self._deadline_seconds:g} s: {doing}{why}",
            culprit,
            None if culprit is None else stacks[culprit] or _tail(self._ranks[culprit].log),
        )

    def _stacks(self) -> list[str]:
        """Where each rank is, by its own fault handler."""
        for rank in self._ranks:
            rank.log.with_suffix(".stack").write_text("")
            with contextlib.suppress(OSError):
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        return [rank.log.with_suffix(".stack").read_text() for rank in self._ranks]

    def _end_all(self) -> None:
        for rank in self._ranks:
            _kill_session(rank.process.pid)
        for rank in self._ranks:
            rank.process.join(_EXIT_SECONDS)


def _server() -> multiprocessing.context.ForkServerContext:
    """The fork server, started once, under the environment that every rank shall have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.worker"])
    with _environment({**MALLOC_SETTINGS, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Ranks import what they need by name. Left to itself multiprocessing would run the parent's script again in every
    rank, which costs its imports and fails for a script without a file."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _kill_session(pid: int | None) -> None:
    """Kills the rank and, once it leads a session, what it started in there."""
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getsid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _waits_for_peers(stack: str) -> bool:
    """Whether a rank's innermost frames are inside a collective."""
    innermost = "\n".join(stack.splitlines()[:8])
    return any(place in innermost for place in ("distributed", "shared_memory", "in wait", "backward"))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log: Path, num_lines: int = 20) -> str | None:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:]) or None
    except OSError:
        return None
