"""One comparison as a person meets it: its cases, its builds, its progress, its report, its way into MLflow."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rich.console import Console

from harness.case import Case, Suite
from harness.paired import paired_report
from harness.paired.builds import Build
from harness.paired.in_turns import ComparedCase, time_in_turns
from harness.paired.paired_report import PairedRun
from harness.paired.side import Side
from harness.suite_run import termination_interrupts

Builds = AbstractContextManager[tuple[Build, Build]]


def timed_cases(suite: Suite, *, only_family: str | None = None) -> list[Case]:
    """The cases of a suite that are timed; where some are of the family `only_family`, those alone. ValueError if none
    is."""
    cases = [case for case in suite.cases if case.measurement.timed_steps and case.implementation != "reference"]
    if not cases:
        raise ValueError(f"suite {suite.name}: expected cases that are timed, found none")
    of_family = [case for case in cases if only_family and case.implementation.partition(".")[0] == only_family]
    return of_family or cases


def run(suite: str, cases: Sequence[Case], opened: Builds, *, device: str, tell: Callable[[str], None]) -> PairedRun:
    """Builds, times and judges. Everything is gone again afterwards, also after a KeyboardInterrupt; ValueError where
    there is no such build."""
    started = time.time()
    with (
        termination_interrupts(),
        opened as (first, second),
        Side(first, device=device) as a,
        Side(second, device=device) as b,
    ):
        tell(f"A {paired_report.named(first)}, B {paired_report.named(second)}: {len(cases)} cases")
        compared: list[ComparedCase] = time_in_turns(cases, a, b, Progress(len(cases), tell))
        return PairedRun(
            a=first,
            b=second,
            suite=suite,
            started=started,
            ended=time.time(),
            cases=paired_report.worst_first(compared),
        )


class Progress:
    """A line for each turn, with what is left by the pace so far."""

    def __init__(self, num_cases: int, tell: Callable[[str], None]) -> None:
        self._num_cases = num_cases
        self._tell = tell
        self._started = time.monotonic()
        self._num_pairs: dict[str, int] = {}
        self._ended: set[str] = set()

    def pairs_done(self, case: Case, done: int, total: int, a_seconds: float, b_seconds: float) -> None:
        self._num_pairs[case.id] = done
        pace = (time.monotonic() - self._started) / sum(self._num_pairs.values())
        open_cases = self._num_cases - len(self._ended)
        left = pace * max(
            0, total * open_cases - sum(self._num_pairs[i] for i in self._num_pairs if i not in self._ended)
        )
        self._tell(
            f"{done}/{total} {case.label} {case.layout}: A {1000 * a_seconds:.3g} ms, B {1000 * b_seconds:.3g} ms; "
            f"at most {_duration(left)} to the end of these"
        )

    def case_ended(self, case: Case, reason: str) -> None:
        self._ended.add(case.id)
        self._tell(f"{case.label} {case.layout}: {reason}")


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Who hears of progress, on standard error: one line that changes on a terminal, a line each anywhere else."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("preparing") as status:
            yield status.update
    else:
        yield lambda line: print(line, file=sys.stderr, flush=True)


def record(compared: PairedRun, kept: Path) -> str:
    """Into MLflow; what comes of that, in one line."""
    from harness import tracking

    try:
        return tracking.send([paired_report.record(compared)], kept=kept).message
    except Exception as error:
        return f"not in MLflow: {' '.join(f'{type(error).__name__}: {error}'.split())}"


def directory_named(suite: str) -> Path:
    return Path("results") / f"compare-{suite}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
