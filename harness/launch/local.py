"""The local launcher: one process per rank on this machine, watched by the parent and ended by it.

A rank leads its own session, writes to its own log, and answers commands over a channel; see `harness.worker`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.launch.emulated import EmulatedNodes
from harness.launch.failure import Ending, Report, first_failure, too_late
from harness.launch.fork_server import Fork
from harness.launch.node_network import NodeNetwork

_GRACE_SECONDS = 1.0  # after the first failure, for the other ranks' own reports
_ECHO_GRACE_SECONDS = 5.0  # the same, while all that is known are echoes of a failure that nobody has told yet
_EXIT_SECONDS = 5.0
_STACK_SECONDS = 2.0
_COLLECTIVE_MARGIN_SECONDS = 60.0  # a rank that waits for another must not give up before the parent does
_LOG_TAIL_BYTES = 8192
_LOG_TAIL_LINES = 20

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank is told when it starts. `directory` is for its log, `rendezvous` the file where the ranks meet."""

    case: dict[str, Any]
    rank: int
    directory: Path
    rendezvous: Path
    weights: Path | None
    device: str
    threads: int
    instrumented: bool
    timeout_seconds: float
    network: NodeNetwork | None = None

    @property
    def log(self) -> Path:
        return self.directory / f"rank-{self.rank}.log"

    @property
    def stack(self) -> Path:
        """Where the rank's fault handler writes, on SIGUSR1, what it is doing."""
        return self.directory / f"rank-{self.rank}.stack"


@dataclass(kw_only=True)
class _Rank:
    fork: Fork
    job: Job
    doing: str = "starting"
    answer: Any = None
    answered: bool = True
    report: Report | None = None
    died_at: float | None = None

    @property
    def is_over(self) -> bool:
        return self.report is not None or self.died_at is not None

    def ending(self, *, stopped: bool = False, stack: str = "") -> Ending:
        return Ending(
            rank=self.job.rank,
            doing=self.doing,
            answered=self.answered,
            report=self.report,
            died_at=self.died_at,
            exit_code=self.fork.process.exitcode,
            stopped=stopped,
            stack=stack,
            log_tail=_tail(self.job.log),
        )


class LocalLaunch:
    """The ranks of one case, waiting for commands, each in the network of its node where there are `nodes`. Use as a
    context manager: leaving it ends every rank.

    The deadline bounds the time that its commands take, all together, with the ranks' start: a launch that waits while
    others have their turn loses nothing.
    """

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
        nodes: EmulatedNodes | None = None,
    ) -> None:
        from harness.worker import main

        directory.mkdir(parents=True, exist_ok=True)
        self._deadline_seconds = deadline_seconds
        self._seconds_left = deadline_seconds
        self._deadline = 0.0
        # Another name for every launch: a file that is left over from a killed one would admit nobody.
        self._rendezvous = directory.resolve() / f"rendezvous-{uuid.uuid4().hex}"
        self._ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                job = Job(
                    case=case,
                    rank=rank,
                    directory=directory,
                    rendezvous=self._rendezvous,
                    weights=weights,
                    device=device,
                    threads=threads,
                    instrumented=instrumented,
                    timeout_seconds=deadline_seconds + _COLLECTIVE_MARGIN_SECONDS,
                    network=None if nodes is None else nodes.network_of(rank),
                )
                self._ranks.append(_Rank(fork=Fork(main, job, f"meshmark rank {rank}"), job=job))
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
        return [rank.fork.pid for rank in self._ranks]

    @property
    def is_alive(self) -> bool:
        """Whether every rank is there to take a command."""
        return bool(self._ranks) and all(rank.fork.process.is_alive() for rank in self._ranks)

    def extend_deadline(self) -> None:
        """Starts the deadline anew, for ranks that take on other work."""
        self._seconds_left = self._deadline_seconds

    def command(self, name: str, on_progress: OnProgress | None = None, **arguments: Any) -> list[Any]:
        """Has every rank carry out the worker's command `name`; their answers in rank order. LaunchFailed, with every
        rank ended, as soon as one raises, dies or leaves without an answer, or when the deadline has passed."""
        assert self._ranks, "the launch has ended"
        began = time.monotonic()
        self._deadline = began + self._seconds_left
        for rank in self._ranks:
            rank.answered = False
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end shows below, with its exit code
                rank.fork.channel.send((name, arguments))
        try:
            while not all(rank.answered for rank in self._ranks):
                self._receive(name, on_progress)
        finally:
            self._seconds_left -= time.monotonic() - began
        return [rank.answer for rank in self._ranks]

    def close(self) -> None:
        """Lets the ranks leave in order; ends those that do not."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.fork.channel.send(("exit", {}))
        until = time.monotonic() + _EXIT_SECONDS
        for rank in self._ranks:
            rank.fork.process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends every rank and whatever it started, at once."""
        for rank in self._ranks:
            rank.fork.kill()
        for rank in self._ranks:
            rank.fork.process.join(_EXIT_SECONDS)
            rank.fork.channel.close()
        self._ranks.clear()  # their numbers may belong to other processes from now on
        with contextlib.suppress(OSError):
            self._rendezvous.unlink(missing_ok=True)

    def _receive(self, name: str, on_progress: OnProgress | None) -> None:
        """Takes in whatever ranks have to say next."""
        sources: list[Any] = [rank.fork.process.sentinel for rank in self._ranks]
        sources += [rank.fork.channel for rank in self._ranks if not rank.answered]
        if not connection.wait(sources, timeout=max(0.0, self._deadline - time.monotonic())):
            self._fail_late(name)
        self._look(on_progress)
        if any(rank.is_over for rank in self._ranks):
            self._fail(name)

    def _look(self, on_progress: OnProgress | None = None) -> None:
        """Reads what every rank has sent, and notices who has died."""
        for rank in self._ranks:
            # A rank's last words come before its end: alive is asked first.
            alive = rank.fork.process.is_alive()
            _take_messages(rank, on_progress if rank is self._ranks[0] else None)
            if not alive and rank.died_at is None:
                rank.died_at = time.monotonic()

    def _fail(self, name: str) -> None:
        """Waits a moment for the others' reports, then ends all and names the culprit."""
        began = time.monotonic()
        while not all(rank.is_over for rank in self._ranks):
            all_echoes = all(rank.report is not None and rank.report.is_echo for rank in self._ranks if rank.is_over)
            if time.monotonic() - began > (_ECHO_GRACE_SECONDS if all_echoes else _GRACE_SECONDS):
                break
            time.sleep(0.02)
            self._look()
        failure = first_failure([rank.ending() for rank in self._ranks], name)
        self.kill()
        raise failure

    def _fail_late(self, name: str) -> None:
        """The deadline has passed: finds out which rank the others wait for."""
        stopped = [rank.fork.state() == "T" for rank in self._ranks]
        stacks = self._stacks()
        endings = [
            rank.ending(stopped=is_stopped, stack=stack)
            for rank, is_stopped, stack in zip(self._ranks, stopped, stacks, strict=True)
        ]
        self.kill()
        raise too_late(endings, name, self._deadline_seconds)

    def _stacks(self) -> list[str]:
        """Where each rank is, by its own fault handler; nothing from one that is stopped."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.job.stack.write_text("")
                os.kill(rank.fork.pid, signal.SIGUSR1)
        until = time.monotonic() + _STACK_SECONDS
        stacks, before = [""], None
        # A handler writes line by line: it is done when nothing is added any more.
        while time.monotonic() < until and (stacks != before or not all(stacks)):
            time.sleep(0.1)
            before, stacks = stacks, [_text(rank.job.stack) for rank in self._ranks]
        return stacks


def _take_messages(rank: _Rank, on_progress: OnProgress | None) -> None:
    """Reads what `rank` has sent, up to an answer."""
    channel = rank.fork.channel
    while rank.report is None and not rank.answered:
        try:
            if not channel.poll():
                return
            kind, content = channel.recv()
        except (EOFError, OSError):
            return  # it is gone, which its sentinel tells
        except Exception as error:  # whatever unpickling raises
            rank.report = Report(
                at=time.monotonic(),
                error=f"its answer cannot be read here: {type(error).__name__}: {error}",
                traceback=traceback.format_exc(),
            )
            return
        if kind == "failed":
            rank.report = content
        elif kind == "answer":
            rank.answer, rank.answered = content, True
        else:
            rank.doing = f"{content[0]} {content[1]}/{content[2]}"
            if on_progress is not None:
                on_progress(*content)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _tail(log: Path) -> str | None:
    """The last lines of a log that may be huge."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    return "\n".join(lines[-_LOG_TAIL_LINES:]) or None
