"""Who failed first: from what is known of each rank when a launch goes wrong to one culprit and a reason of one line.

The others of a failed rank fail after it, and often tell so sooner: a lost connection, a timeout, an abort. Such an
*echo* is the culprit only where nothing else is known. Where all that is known are timeouts, the culprit is who came
neither to the collective nor to the monitored barrier that its peers held afterwards.
"""

from __future__ import annotations

import linecache
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from harness.result import Status

# As gloo, NCCL, torch's stores and our own shared memory say that a peer did not come.
_LATE = re.compile(
    r"timed out waiting \d+ ?ms|waited \d+ s for|collective operation timeout|(wait )?timeout (after|waiting for key)",
    re.IGNORECASE,
)
_ECHO = re.compile(
    r"connection (was |is )?(likely )?(closed|reset|refused)|closed by peer|broken pipe|pair closure|timed out"
    rf"|communicator was aborted|remote process exited|remote error|{_LATE.pattern}",
    re.IGNORECASE,
)
_NOTICE_SECONDS = 1.0  # the most by which a death is noticed after its peers have raised because of it
_FRAME = re.compile(r'^ +File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>\S+)', re.MULTILINE)
_NUM_INNERMOST_FRAMES = 6  # from a flag that is polled up to the `wait` that polls it


class LaunchFailed(Exception):
    """A launch ended early. `reason` is one line that names the rank; `culprit` is the rank that failed first, where it
    is known, and `traceback` its own words."""

    def __init__(self, status: Status, reason: str, culprit: int | None = None, traceback: str | None = None) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason
        self.culprit = culprit
        self.traceback = traceback


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank says of the exception that ended its work; `at` is on the machine's monotonic clock. `missing` are
    the ranks that it found absent when it met its peers once more, after a collective had timed out."""

    at: float
    error: str  # one line
    traceback: str
    out_of_memory: bool = False
    missing: tuple[int, ...] = ()

    @property
    def is_echo(self) -> bool:
        return _ECHO.search(self.error) is not None

    @property
    def is_timeout(self) -> bool:
        """Whether it says that its peers did not come in time."""
        return _LATE.search(self.error) is not None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is known of one rank. `died_at` is when its death was noticed, with its exit code (negative: the signal);
    `stack` is where it was, by its own fault handler."""

    rank: int
    doing: str
    answered: bool = False
    report: Report | None = None
    died_at: float | None = None
    exit_code: int | None = None
    stopped: bool = False
    stack: str = ""
    log_tail: str | None = None
    out_of_memory: bool = False  # the system ended it for want of memory

    @property
    def died_by_signal(self) -> bool:
        """Whether somebody killed it. torchrun's agents end the others of a failed worker by SIGTERM, and a backend
        that has lost a peer may abort its process."""
        return (self.exit_code or 0) < 0 and self.exit_code not in (-signal.SIGABRT, -signal.SIGTERM)

    @property
    def waits_for_peers(self) -> bool:
        return bool(self.stack) and waits_for_peers(self.stack)


def first_failure(endings: Sequence[Ending], command: str, *, signals_first: bool = False) -> LaunchFailed:
    """The failure of the rank that raised or died first, echoes last. `signals_first`: of whoever was killed, where the
    times come from several agents and tell little."""
    over = [ending for ending in endings if ending.report or ending.died_at is not None]
    killed = [ending for ending in over if ending.report is None and ending.died_by_signal]
    first = min(killed if signals_first and killed else over, key=_order)
    if only_aborted(endings) and (stopped := [ending for ending in endings if ending.stopped]):
        why = f"rank {stopped[0].rank} is stopped: in {command} ({first.doing}) rank {first.rank} aborted"
        return LaunchFailed("timed out", why, stopped[0].rank, first.log_tail)
    if first.report is not None:
        status: Status = "out of memory" if first.report.out_of_memory else "failed"
        return LaunchFailed(status, f"rank {first.rank}: {first.report.error}", first.rank, first.report.traceback)
    code = first.exit_code or 0
    if first.out_of_memory:
        reason = f"rank {first.rank} was killed by the system, which ran out of memory, during {command}"
        return LaunchFailed("out of memory", f"{reason} ({first.doing})", first.rank, first.log_tail)
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"left with exit code {code} and no record"
    return LaunchFailed(
        "failed", f"rank {first.rank} {how} during {command} ({first.doing})", first.rank, first.log_tail
    )


def _order(ending: Ending) -> tuple[bool, float, int]:
    if ending.report is not None:
        return ending.report.is_echo, ending.report.at, ending.rank
    assert ending.died_at is not None
    # A backend that has lost a peer may abort its process, and an agent ends a failed worker's peers.
    return ending.exit_code in (-signal.SIGABRT, -signal.SIGTERM), ending.died_at - _NOTICE_SECONDS, ending.rank


def too_late(endings: Sequence[Ending], command: str, deadline_seconds: float) -> LaunchFailed:
    """The failure of a launch that has passed its deadline: the culprit is a rank that is stopped, or else one that
    does something other than wait for its peers. Where every rank waits there is none, and all stacks are kept."""
    silent = [ending for ending in endings if not ending.answered]
    stopped = [ending for ending in silent if ending.stopped]
    busy = [ending for ending in silent if not ending.waits_for_peers]
    suspects = stopped or busy or (silent if len(silent) == 1 else [])
    doing = "; ".join(f"rank {ending.rank} {ending.doing}" for ending in silent)
    if suspects:
        culprit = suspects[0]
        why, words = f"rank {culprit.rank} {'is stopped' if stopped else 'hangs'}", culprit.stack or culprit.log_tail
    else:
        why, words = "every rank waits for another", "\n".join(f"rank {e.rank}:\n{e.stack}" for e in silent)
    return LaunchFailed(
        "timed out",
        f"{why}: no answer to {command} within the deadline of {deadline_seconds:g} s ({doing})",
        suspects[0].rank if suspects else None,
        words or None,
    )


def nobody_came(endings: Sequence[Ending]) -> bool:
    """Whether all that is known are ranks that have waited for others too long. Who times out first hangs up on the
    others, which then tell of a lost connection."""
    over = [ending for ending in endings if ending.report or ending.died_at is not None]
    reports = [ending.report for ending in over if ending.report is not None and ending.report.is_echo]
    return len(reports) == len(over) and any(report.is_timeout for report in reports)


def only_aborted(endings: Sequence[Ending]) -> bool:
    """Whether some ranks have aborted, as NCCL has them do when a collective times out, and the others say nothing."""
    over = [ending for ending in endings if ending.report or ending.died_at is not None]
    aborted = [ending for ending in over if ending.report is None and ending.exit_code == -signal.SIGABRT]
    return 0 < len(aborted) == len(over) < len(endings)


def missed(endings: Sequence[Ending], command: str) -> LaunchFailed:
    """The failure of a launch of which `nobody_came` holds. Of those that were missed, or else have not spoken, the
    culprit is one that is stopped, or else does something other than wait for its peers. One that was missed and says
    that it waited, too, cannot be reached."""
    first = min((ending for ending in endings if ending.report and ending.report.is_timeout), key=_order)
    assert first.report is not None
    absent = {rank for ending in endings if ending.report for rank in ending.report.missing}
    missing = [ending for ending in endings if ending.rank in absent] or [e for e in endings if e.report is None]
    silent = [ending for ending in missing if ending.report is None]
    stopped = [ending for ending in silent if ending.stopped]
    suspects = stopped or [ending for ending in silent if not ending.waits_for_peers]
    waited = f"in {command} ({first.doing}) rank {first.rank} gave up: {first.report.error}"
    if suspects:
        culprit = suspects[0]
        why = f"rank {culprit.rank} {'is stopped' if stopped else 'hangs'}"
        return LaunchFailed("timed out", f"{why}: {waited}", culprit.rank, culprit.stack or culprit.log_tail)
    if unreached := [ending for ending in missing if ending.report is not None]:
        whom = " and ".join(f"rank {ending.rank}" for ending in unreached)
        why = f"rank 0 cannot reach {whom}, though all are alive: is the link between them down?"
        return LaunchFailed("timed out", f"{why} {waited}", unreached[0].rank, first.report.traceback)
    words = "\n".join(f"rank {e.rank}:\n{e.report.traceback if e.report else e.stack}" for e in endings)
    return LaunchFailed("timed out", f"every rank waits for another: {waited}", None, words)


def waits_for_peers(stack: str) -> bool:
    """Whether a stack (innermost frame first, as faulthandler writes it) ends in a collective or in a wait for one."""
    frames = list(_FRAME.finditer(stack))[:_NUM_INNERMOST_FRAMES]
    if not frames:
        return False
    if any("/torch/distributed/" in frame["path"] or re.search("wait|until", frame["function"]) for frame in frames):
        return True
    innermost = frames[0]
    # Work.wait is not a Python frame, but its caller's line shows it. Gradient hooks in C++ wait inside backward.
    called = linecache.getline(innermost["path"], int(innermost["line"]))
    return ".wait(" in called or innermost["function"] == "_engine_run_backward"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; its number where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
