"""Who failed first: from what is known of each rank when a launch goes wrong to one culprit and a reason of one line.

The others of a failed rank fail after it, and often tell so sooner: a lost connection, a timeout, an abort. Such an
*echo* is the culprit only where nothing else is known.
"""

from __future__ import annotations

import linecache
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from harness.result import Status

_ECHO = re.compile(
    r"connection (was |is )?(likely )?(closed|reset|refused)|closed by peer|broken pipe|pair closure|timed out"
    r"|waited \d+ s for|communicator was aborted|remote process exited|remote error",
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
    """What a rank says of the exception that ended its work; `at` is on the machine's monotonic clock."""

    at: float
    error: str  # one line
    traceback: str
    out_of_memory: bool = False

    @property
    def is_echo(self) -> bool:
        return _ECHO.search(self.error) is not None


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

    @property
    def waits_for_peers(self) -> bool:
        return bool(self.stack) and waits_for_peers(self.stack)


def first_failure(endings: Sequence[Ending], command: str) -> LaunchFailed:
    """The failure of the rank that raised or died first, echoes last."""
    first = min((ending for ending in endings if ending.report or ending.died_at is not None), key=_order)
    if first.report is not None:
        status: Status = "out of memory" if first.report.out_of_memory else "failed"
        return LaunchFailed(status, f"rank {first.rank}: {first.report.error}", first.rank, first.report.traceback)
    code = first.exit_code or 0
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"left with exit code {code} and no record"
    return LaunchFailed(
        "failed", f"rank {first.rank} {how} during {command} ({first.doing})", first.rank, first.log_tail
    )


def _order(ending: Ending) -> tuple[bool, float, int]:
    if ending.report is not None:
        return ending.report.is_echo, ending.report.at, ending.rank
    assert ending.died_at is not None
    # A backend that has lost a peer may abort its process.
    return ending.exit_code == -signal.SIGABRT, ending.died_at - _NOTICE_SECONDS, ending.rank


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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
