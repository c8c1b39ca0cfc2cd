"""Progress: what a person sees while a suite runs: a live table on a terminal, one line an event anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.case import Case, Suite
from harness.report import STATUS_STYLES, headline
from harness.result import Result


class Progress(Protocol):
    """What the runner tells while it works, from its main thread. `text` of a phase says what is done, `done` of
    `total` how far; total 0 means that nobody knows."""

    def suite_started(self, suite: Suite, cases: Sequence[Case]) -> None: ...
    def case_started(self, case: Case) -> None: ...
    def phase(self, case: Case, text: str, done: int, total: int) -> None: ...
    def case_finished(self, result: Result) -> None: ...
    def note(self, text: str) -> None: ...
    def suite_finished(self, results: Sequence[Result]) -> None: ...


@contextmanager
def shown_on(console: Console, *, silent: bool = False) -> Iterator[Progress]:
    """The progress that suits `console`; whatever happens inside, the terminal is left as it was."""
    if silent:
        yield SilentProgress()
    elif console.is_terminal:
        progress = RichProgress(console)
        try:
            yield progress
        finally:
            progress.stop()
    else:
        yield PlainProgress(console)


class SilentProgress:
    """Shows nothing: standard output belongs to the JSON."""

    def suite_started(self, suite: Suite, cases: Sequence[Case]) -> None:
        pass

    def case_started(self, case: Case) -> None:
        pass

    def phase(self, case: Case, text: str, done: int, total: int) -> None:
        pass

    def case_finished(self, result: Result) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def suite_finished(self, results: Sequence[Result]) -> None:
        pass


class PlainProgress:
    """One line an event, for logs. A phase is a line when it begins; its counts are lines only where the log would
    otherwise say nothing for `quiet_seconds`."""

    def __init__(self, console: Console, *, quiet_seconds: float = 30.0) -> None:
        self._console = console
        self._quiet_seconds = quiet_seconds
        self._last_line = time.monotonic()
        self._positions: dict[str, int] = {}
        self._num_cases = 0
        self._phases: dict[str, str] = {}

    def suite_started(self, suite: Suite, cases: Sequence[Case]) -> None:
        self._positions = {case.id: number for number, case in enumerate(cases, start=1)}
        self._num_cases = len(cases)
        self._line(f"{suite.name}: {_count(len(cases), 'case')}")

    def case_started(self, case: Case) -> None:
        self._case_line(case, "started")

    def phase(self, case: Case, text: str, done: int, total: int) -> None:
        if self._phases.get(case.id) != text:
            self._phases[case.id] = text
            self._case_line(case, text)
        elif total and time.monotonic() - self._last_line >= self._quiet_seconds:
            self._case_line(case, f"{text} {_counted(done, total)}")

    def case_finished(self, result: Result) -> None:
        self._case_line(result.case, f"{result.shown_status}, {headline(result)}, {result.duration_seconds:.1f} s")

    def note(self, text: str) -> None:
        self._line(text)

    def suite_finished(self, results: Sequence[Result]) -> None:
        self._line(tally(results))

    def _case_line(self, case: Case, text: str) -> None:
        at = f"[{self._positions[case.id]}/{self._num_cases}] " if case.id in self._positions else ""
        self._line(f"{at}{case.label} {case.layout} {case.workload} {case.precision}: {text}")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        # The console's file, not the console: a log line is never wrapped.
        print(" ".join(text.split()), file=self._console.file, flush=True)


@dataclass
class Row:
    """One case in the live table. `seconds` is set once the case has finished."""

    case: Case
    started: float | None = None
    phase: str = ""
    seconds: float | None = None
    result: Result | None = None

    @property
    def state(self) -> str:
        if self.result is not None:
            return self.result.shown_status
        return "waiting" if self.started is None else "running"


class RichProgress:
    """A live table, one line a case. It draws once a second whatever happens, so that showing a run costs its ranks
    less than a hundredth of one core."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, Row] = {}
        self._name = ""
        self._started = time.monotonic()
        # The last one set: it renders once already.
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=1, transient=True)

    def suite_started(self, suite: Suite, cases: Sequence[Case]) -> None:
        self._name = suite.name
        self._started = time.monotonic()
        self._rows = {case.id: Row(case=case) for case in cases}
        self._live.start(refresh=True)

    def case_started(self, case: Case) -> None:
        self._row(case).started = time.monotonic()

    def phase(self, case: Case, text: str, done: int, total: int) -> None:
        self._row(case).phase = f"{text} {_counted(done, total)}" if total else text

    def case_finished(self, result: Result) -> None:
        row = self._row(result.case)
        row.result = result
        row.seconds = result.duration_seconds

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def suite_finished(self, results: Sequence[Result]) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the table off the terminal."""
        self._live.stop()

    def render(self) -> RenderableType:
        now = time.monotonic()
        rows = list(self._rows.values())
        height = max(3, self._console.height - 3)  # the heading, and a line left for the cursor
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=_widest((row.state for row in rows), at_most=13), no_wrap=True)
        table.add_column(
            width=_widest((row.case.label for row in rows), at_most=self._console.width * 2 // 7),
            no_wrap=True,
            overflow="ellipsis",
        )
        table.add_column(
            width=_widest((str(row.case.layout) for row in rows), at_most=16), no_wrap=True, overflow="ellipsis"
        )
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(ratio=2, no_wrap=True, overflow="ellipsis")
        table.add_column(width=7, justify="right", no_wrap=True)
        for row in window(rows, height):
            table.add_row(*_cells(row, now))
        return Group(Text(self._heading(rows, now), style="bold", no_wrap=True, overflow="ellipsis"), table)

    def _heading(self, rows: Sequence[Row], now: float) -> str:
        results = [row.result for row in rows if row.result is not None]
        parts = [f"{self._name}: {len(results)} of {_count(len(rows), 'case')} done"]
        if bad := sum(not result.is_harmless for result in results):
            parts.append(f"{bad} not ok")
        elapsed = now - self._started
        parts.append(clock(elapsed))
        left = remaining_seconds(elapsed, len(results), len(rows))
        if left is not None:
            parts.append(f"about {clock(left)} left")
        return ", ".join(parts)

    def _row(self, case: Case) -> Row:
        # A runner may run what no suite lists: the reference of a case.
        return self._rows.setdefault(case.id, Row(case=case))


def _widest(texts: Iterable[str], *, at_most: int) -> int:
    """The columns that the longest of `texts` needs; 7 at least (`waiting`, `running`), so that nothing jumps."""
    return min(at_most, max(7, *map(len, texts), 0))


def _cells(row: Row, now: float) -> tuple[Text, ...]:
    style = STATUS_STYLES.get(row.state, "dim" if row.started is None else "cyan")
    doing = headline(row.result) if row.result is not None else row.phase
    seconds = row.seconds if row.seconds is not None else None if row.started is None else now - row.started
    return (
        Text(row.state, style=style),
        Text(row.case.label),
        Text(str(row.case.layout)),
        Text(f"{row.case.workload} {row.case.precision}", style="dim"),
        Text(doing),
        Text("" if seconds is None else clock(seconds), style="dim"),
    )


def window(rows: Sequence[Row], height: int) -> Sequence[Row]:
    """The `height` rows around the first unfinished one: two thirds of what follows it, a third of what went before."""
    current = next((index for index, row in enumerate(rows) if row.result is None), len(rows))
    first = max(0, min(current - height // 3, len(rows) - height))
    return rows[first : first + height]


def remaining_seconds(elapsed: float, num_finished: int, num_cases: int) -> float | None:
    """How long the rest takes if it goes on like this; None under two finished cases, which say too little."""
    if num_finished < 2 or num_finished == num_cases:
        return None
    return elapsed / num_finished * (num_cases - num_finished)


def tally(results: Sequence[Result]) -> str:
    """`12 cases: 10 ok, 1 unavailable, 1 failed`."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result.shown_status] = counts.get(result.shown_status, 0) + 1
    return f"{_count(len(results), 'case')}: " + ", ".join(f"{count} {status}" for status, count in counts.items())


def clock(seconds: float) -> str:
    """`0:05`, `12:30`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _counted(done: int, total: int) -> str:
    # Warming up may take more steps than were planned.
    return f"{done}/{total}" if done <= total else str(done)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
