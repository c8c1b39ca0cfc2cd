"""A launch under watch: the ranks of one case take commands over channels; who raises, dies, hangs or is late is named,
and all are ended.

How ranks are started is a launcher's: `local` forks them here, `torchrun` has agents on nodes start them.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from harness.launch.failure import (
    Ending,
    LaunchFailed,
    Report,
    first_failure,
    missed,
    nobody_came,
    only_aborted,
    too_late,
)
from harness.launch.memory_kills import num_memory_kills, was_killed_for_memory
from harness.launch.node_network import NodeNetwork
from harness.launch.timeouts import Timeouts

_GRACE_SECONDS = 1.0  # after the first failure, for the other ranks' own reports
_ECHO_GRACE_SECONDS = 5.0  # the same, while all that is known are echoes of a failure that nobody has told yet
_EXIT_SECONDS = 5.0
_STACK_SECONDS = 2.0
_LOG_TAIL_BYTES = 8192
_LOG_TAIL_LINES = 20

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank is told when it starts. `directory` is for its log, `rendezvous` the file where the ranks meet;
    None where torchrun's own store is the place."""

    case: dict[str, Any]
    rank: int
    directory: Path
    rendezvous: Path | None
    weights: Path | None
    device: str
    local_rank: int
    threads: int
    instrumented: bool
    timeout_seconds: float  # of a collective, until a step's length is known
    timeouts: Timeouts  # from then on
    network: NodeNetwork | None = None

    @property
    def log(self) -> Path:
        return self.directory / f"rank-{self.rank}.log"

    @property
    def stack(self) -> Path:
        """Where the rank's fault handler writes, on SIGUSR1, what it is doing."""
        return self.directory / f"rank-{self.rank}.stack"


class RankProcess(Protocol):
    """A rank's process, wherever it runs. `channel` carries commands and answers; `is_here`: on this machine, with its
    clock."""

    @property
    def channel(self) -> Any: ...

    @property
    def is_here(self) -> bool: ...

    @property
    def pid(self) -> int: ...

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal; None while it runs, or where nobody can tell."""
        ...

    @property
    def ends(self) -> Any:
        """What `multiprocessing.connection.wait` finds ready once the process has ended."""
        ...

    def is_alive(self) -> bool: ...

    def is_stopped(self) -> bool:
        """Whether it has been stopped by a signal, as far as can be told."""
        ...

    def ask_for_stack(self) -> None:
        """Has the process write where it is to `Job.stack`."""
        ...

    def join(self, timeout_seconds: float) -> None: ...

    def kill(self) -> None:
        """Ends it, and what it has started, at once."""
        ...


@dataclass(kw_only=True)
class Rank:
    """What a launch knows of one rank."""

    process: RankProcess
    job: Job
    doing: str = "starting"
    answer: Any = None
    answered: bool = True
    report: Report | None = None
    died_at: float | None = None
    out_of_memory: bool = False

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
            exit_code=self.process.exit_code,
            stopped=stopped,
            stack=stack,
            log_tail=_tail(self.job.log),
            out_of_memory=self.out_of_memory,
        )


class Launch:
    """The ranks of one case, waiting for commands, each in the network of its node where there are `nodes`. Use as a
    context manager: leaving it ends every rank.

    The deadline bounds the time that its commands take, all together, with the ranks' start: a launch that waits while
    others have their turn loses nothing.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._seconds_left = deadline_seconds
        self._deadline = 0.0
        self._bound_seconds = deadline_seconds
        self._ranks: list[Rank] = []
        self._memory_kills = num_memory_kills()

    def __enter__(self) -> Self:
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

    @property
    def is_alive(self) -> bool:
        """Whether every rank is there to take a command."""
        return bool(self._ranks) and all(rank.process.is_alive() for rank in self._ranks)

    def extend_deadline(self) -> None:
        """Starts the deadline anew, for ranks that take on other work."""
        self._seconds_left = self._deadline_seconds

    def command(
        self,
        name: str,
        on_progress: OnProgress | None = None,
        *,
        within_seconds: float = math.inf,
        **arguments: Any,
    ) -> list[Any]:
        """Has every rank carry out the worker's command `name`; their answers in rank order. LaunchFailed, with every
        rank ended, as soon as one raises, dies or leaves without an answer, or when the deadline, or `within_seconds`,
        has passed."""
        assert self._ranks, "the launch has ended"
        began = time.monotonic()
        self._deadline = began + min(self._seconds_left, within_seconds)
        self._bound_seconds = min(self._deadline_seconds, within_seconds)
        for rank in self._ranks:
            rank.answered = False
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end shows below, with its exit code
                rank.process.channel.send((name, arguments))
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
                rank.process.channel.send(("exit", {}))
        until = time.monotonic() + _EXIT_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends every rank and whatever it started, at once."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join(_EXIT_SECONDS)
            rank.process.channel.close()
        self._ranks.clear()  # their numbers may belong to other processes from now on
        self._clean_up()

    def _clean_up(self) -> None:
        """Whatever a launcher leaves behind once no rank is left."""

    def _before_blaming(self) -> None:
        """Whatever a launcher may still find out of how ranks have ended."""

    def _receive(self, name: str, on_progress: OnProgress | None) -> None:
        """Takes in whatever ranks have to say next."""
        sources: list[Any] = [rank.process.ends for rank in self._ranks]
        sources += [rank.process.channel for rank in self._ranks if not rank.answered]
        if not connection.wait(sources, timeout=max(0.0, self._deadline - time.monotonic())):
            self._fail_late(name)
        self._look(on_progress)
        if any(rank.is_over for rank in self._ranks):
            self._fail(name)

    def _look(self, on_progress: OnProgress | None = None) -> None:
        """Reads what every rank has sent, and notices who has died."""
        for rank in self._ranks:
            # A rank's last words come before its end: alive is asked first.
            alive = rank.process.is_alive()
            _take_messages(rank, on_progress if rank is self._ranks[0] else None)
            if not alive and rank.died_at is None:
                rank.died_at = time.monotonic()

    def _fail(self, name: str) -> None:
        """Waits a moment for the others' reports, then ends all and names the culprit."""
        began = time.monotonic()
        while not all(rank.is_over for rank in self._ranks):
            all_echoes = all(rank.report is not None and rank.report.is_echo for rank in self._ranks if rank.is_over)
            silent = {rank.job.rank for rank in self._ranks if not rank.is_over}
            awaits_cause = all_echoes and not silent <= self._known_missing()
            if time.monotonic() - began > (_ECHO_GRACE_SECONDS if awaits_cause else _GRACE_SECONDS):
                break
            time.sleep(0.02)
            self._look()
        self._before_blaming()
        for rank in self._ranks:
            if rank.died_at is not None and rank.report is None and rank.process.is_here:
                rank.out_of_memory = was_killed_for_memory(rank.process.exit_code, self._memory_kills)
        endings = [rank.ending() for rank in self._ranks]
        if nobody_came(endings):
            failure = missed(self._looked_at(), name)
        else:
            failure = self._blame(self._looked_at() if only_aborted(endings) else endings, name)
        self.kill()
        raise failure

    def _known_missing(self) -> set[int]:
        """The ranks that others missed after a collective had timed out."""
        return {missing for rank in self._ranks if rank.report is not None for missing in rank.report.missing}

    def _blame(self, endings: Sequence[Ending], name: str) -> LaunchFailed:
        """The failure that these endings make during the command `name`."""
        return first_failure(endings, name)

    def _fail_late(self, name: str) -> None:
        """The deadline has passed: finds out which rank the others wait for."""
        endings = self._looked_at()
        self.kill()
        raise too_late(endings, name, self._bound_seconds)

    def _looked_at(self) -> list[Ending]:
        """What is known of each rank, and whether it is stopped, and where it is."""
        stopped = [rank.process.is_stopped() for rank in self._ranks]
        stacks = self._stacks()
        return [
            rank.ending(stopped=is_stopped, stack=stack)
            for rank, is_stopped, stack in zip(self._ranks, stopped, stacks, strict=True)
        ]

    def _stacks(self) -> list[str]:
        """Where each rank is, by its own fault handler; nothing from one that is stopped."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.job.stack.write_text("")
                rank.process.ask_for_stack()
        until = time.monotonic() + _STACK_SECONDS
        stacks, before = [""], None
        # A handler writes line by line: it is done when nothing is added any more.
        while time.monotonic() < until and (stacks != before or not all(stacks)):
            time.sleep(0.1)
            before, stacks = stacks, [_text(rank.job.stack) for rank in self._ranks]
        return stacks


def _take_messages(rank: Rank, on_progress: OnProgress | None) -> None:
    """Reads what `rank` has sent, up to an answer."""
    channel = rank.process.channel
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
            # Another machine's clock says nothing here.
            rank.report = content if rank.process.is_here else replace(content, at=time.monotonic())
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
