"""The report of a comparison: for a terminal, as Markdown for a comment under a change, as JSON, for the tracker."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.markdown import plain, plain_row
from harness.paired.builds import Build
from harness.paired.in_turns import RED, ComparedCase, ComparedVerdict
from harness.paired.side import Timing
from harness.regression.check_report import VERDICT_STYLES
from harness.run_record import RunRecord

COMPARISONS_EXPERIMENT = "meshmark/comparisons"
PAIRS_FILE = "pairs.json"
_HEADERS = ("verdict", "case", "workload", "A ms", "B ms", "B takes", "interval", "p", "pairs")


@dataclass(frozen=True, kw_only=True)
class PairedRun:
    """A comparison of builds `a` and `b` over a suite, the worst first. `started`, `ended`: seconds since the epoch."""

    a: Build
    b: Build
    suite: str
    started: float
    ended: float
    cases: tuple[ComparedCase, ...]

    @property
    def is_red(self) -> bool:
        """Also where no case could be compared: whoever waits for a verdict has none."""
        return self.compared_nothing or any(case.verdict in RED for case in self.cases)

    @property
    def compared_nothing(self) -> bool:
        return all(case.verdict == "not compared" for case in self.cases)

    @property
    def verdict(self) -> ComparedVerdict:
        """That of the worst case."""
        return worst_first(self.cases)[0].verdict

    @property
    def name(self) -> str:
        stamp = datetime.fromtimestamp(self.started, UTC)
        return f"{self.suite} {self.a.name} {self.b.name} {stamp:%Y%m%dT%H%M%S.%fZ}"


def worst_first(cases: Sequence[ComparedCase]) -> tuple[ComparedCase, ...]:
    order = get_args(ComparedVerdict)
    return tuple(sorted(cases, key=lambda case: order.index(case.verdict)))


def summary(run: PairedRun) -> str:
    """One line: what was compared, and how many cases got which verdict."""
    counts = Counter(case.verdict for case in run.cases)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(ComparedVerdict) if counts[verdict])
    told += ", so there is no verdict" if run.compared_nothing else ""
    return f"{'RED' if run.is_red else 'not red'}: {run.suite}, B {named(run.b)} against A {named(run.a)}: {told}"


def text(run: PairedRun) -> RenderableType:
    """For a terminal: every case, the worst first, with the reasons of those that could not be compared below."""
    table = Table(box=box.HORIZONTALS, show_edge=False)
    for header in _HEADERS:
        words = header in ("verdict", "case", "workload")
        table.add_column(header, no_wrap=header != "workload", overflow="fold", justify="left" if words else "right")
    for case in run.cases:
        verdict, *cells = _cells(case)
        table.add_row(Text(verdict, style=VERDICT_STYLES.get(verdict, "dim")), *map(Text, cells))
    return Group(table, Text(), *(Text(reason) for reason in _reasons(run)), Text(summary(run)))


def markdown(run: PairedRun) -> str:
    """For a comment: every case."""
    lines = [f"**{plain(summary(run))}**", "", plain_row(_HEADERS), "|---|---|---|---:|---:|---:|---:|---:|---:|"]
    lines += [plain_row(_cells(case)) for case in run.cases]
    lines += ["", *(f"- {plain(reason)}" for reason in _reasons(run))]
    return "\n".join(lines).rstrip() + "\n"


def to_json(run: PairedRun) -> dict[str, Any]:
    """Plain values, with the time of every step of every run."""
    return {
        "suite": run.suite,
        "red": run.is_red,
        "started": run.started,
        "ended": run.ended,
        "a": {"name": run.a.name, "commit": run.a.commit},
        "b": {"name": run.b.name, "commit": run.b.commit},
        "cases": [
            {
                "case": {"id": case.case.id, **case.case.to_json()},
                "verdict": case.verdict,
                "reason": case.reason,
                "comparison": asdict(case.comparison) if case.comparison else None,
                "adjusted_p_value": case.p_value,
                "a": [asdict(timing) for timing in case.a],
                "b": [asdict(timing) for timing in case.b],
                "hiccups": [asdict(timing) for timing in case.hiccups],
            }
            for case in run.cases
        ],
    }


def write(run: PairedRun, directory: Path) -> Path:
    """Keeps all of it in `directory`, and says where."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PAIRS_FILE
    path.write_text(json.dumps(to_json(run), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def record(run: PairedRun) -> RunRecord:
    """What a tracker shows: one run for the comparison, with a figure for each case."""
    metrics = {f"cases.{verdict}": 0.0 for verdict in get_args(ComparedVerdict)}
    for case in run.cases:
        metrics[f"cases.{case.verdict}"] += 1
        if case.comparison is not None and case.p_value is not None:
            metrics |= {
                f"shift/{case.case.id}": case.comparison.shift,
                f"p_value/{case.case.id}": case.p_value,
                f"pairs/{case.case.id}": float(case.comparison.num_pairs),
            }
    return RunRecord(
        experiment=COMPARISONS_EXPERIMENT,
        suite_run=run.name,
        case_id="",
        name=run.name,
        tags={
            "suite": run.suite,
            "verdict": run.verdict,
            "a": run.a.name,
            "b": run.b.name,
            **({"commit": run.b.commit, "commit_a": run.a.commit} if run.b.commit else {}),
            "mlflow.note.content": markdown(run)[:5000],
        },
        metrics=metrics,
        artifacts={PAIRS_FILE: json.dumps(to_json(run), allow_nan=False), "report.md": markdown(run)},
        finished=not run.is_red,
        started=run.started,
        ended=run.ended,
    )


def named(build: Build) -> str:
    """With its commit, where the name is not that."""
    return (
        f"{build.name} ({build.commit[:8]})" if build.commit and not build.commit.startswith(build.name) else build.name
    )


def _reasons(run: PairedRun) -> list[str]:
    return [f"{case.case.label} {case.case.layout}: {case.reason}" for case in run.cases if case.reason]


def _cells(case: ComparedCase) -> tuple[str, ...]:
    """Those of _HEADERS."""
    where = (case.verdict, f"{case.case.label} {case.case.layout}", f"{case.case.workload}, {case.case.precision}")
    comparison = case.comparison
    if comparison is None or case.p_value is None:
        return (*where, *["-"] * 6)
    low, high = comparison.interval
    return (
        *where,
        _milliseconds(case.a),
        _milliseconds(case.b),
        f"{comparison.shift:+.1%}",
        f"{low:+.1%} to {high:+.1%}",
        f"{case.p_value:.2g}",
        str(comparison.num_pairs),
    )


def _milliseconds(timings: Sequence[Timing]) -> str:
    """The median of the runs' medians."""
    return f"{1000 * statistics.median([timing.seconds for timing in timings if timing.seconds is not None]):.3g}"
