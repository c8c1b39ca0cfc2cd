"""The report of a results directory: the table people read, as text for a terminal or as Markdown."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.markdown import fenced, plain, plain_row
from harness.measured_on import measured_on
from harness.reasons import departures, reasons, shown_parity, unpredicted
from harness.result import RESULTS_FILE, Parity, Result

RATIOS_FILE = "ratios.json"
REPORT_FILE = "report.md"
STATUS_STYLES = {
    "ok": "green",
    "unsupported": "dim",
    "unavailable": "yellow",
    "parity failed, as expected": "yellow",
    "ok, other work": "yellow",
} | dict.fromkeys(
    ("failed", "timed out", "out of memory", "topology mismatch", "bytes mismatch", "parity failed"), "bold red"
)
MLFLOW_COMMAND = "mlflow ui --backend-store-uri sqlite:///mlflow.db"
_MIB = 2**20
_WHOSE = {"subject": "ours", "peer": "peer"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its header with the unit, and how a cell is read off a row. A terminal narrower than `from_width`
    leaves it out."""

    header: str
    cell: Callable[[Any], str]
    numeric: bool = True
    from_width: int = 0


def figure(value: float | None, scale: float = 1.0) -> str:
    """`value * scale` with three digits that matter (all of them from 100 up); `-` for what is not known."""
    if value is None:
        return "-"
    scaled = float(value) * scale
    for least, decimals in ((100, 0), (10, 1), (1, 2)):
        if abs(scaled) >= least:
            return f"{scaled:,.{decimals}f}"
    return f"{scaled:.3g}"


def headline(result: Result) -> str:
    """What became of a case in a few words: its speed, or the reason why there is none."""
    if result.status not in ("ok", "parity failed"):
        return " ".join((result.reason or result.status).split())
    unit = unit_of([result])
    speed = result.metrics.get(f"throughput.{unit}_per_second")
    parts = [] if speed is None else [f"{figure(speed)} {unit}/s"]
    if (parity := _parity(result)) != "-":
        parts.append(f"parity {parity}")
    return ", ".join(parts) or result.status


def unit_of(results: Sequence[Result]) -> str:
    """`tokens` or `samples`: what these results count their throughput in."""
    return "samples" if any("throughput.samples_per_second" in result.metrics for result in results) else "tokens"


def _metric(name: str, scale: float = 1.0) -> Callable[[Result], str]:
    return lambda result: figure(result.metrics.get(name), scale)


def _parity(result: Result) -> str:
    return shown_parity(result, {"ok": "ok", "failed": "FAILED" if result.parity is None else _failure(result.parity)})


def _failure(parity: Parity) -> str:
    step = "" if parity.first_bad_step is None else f" at step {parity.first_bad_step}"
    return f"FAILED{step}" + (f": {parity.worst_parameter}" if parity.worst_parameter else "")


def _label(result: Result) -> str:
    return result.case.label + (" (floor)" if result.case.role == "floor" else "")


def _where(result: Result) -> str:
    """The layout, and the nodes where there are several."""
    case = result.case
    return str(case.layout) if case.placed.num_nodes == 1 else f"{case.layout}, {case.placed}"


def _in_flight(result: Result) -> str:
    """Measured / by theory."""
    names = ("pipeline.in_flight_micro_batches", "pipeline.predicted_in_flight_micro_batches")
    counts = [f"{result.metrics[name]:g}" if name in result.metrics else "-" for name in names]
    return "-" if counts == ["-", "-"] else " / ".join(counts)


PIPELINE_COLUMNS = (
    Column(header="bubble %", cell=_metric("pipeline.bubble_ratio", 100)),
    Column(header="replayed %", cell=_metric("pipeline.replayed_bubble_ratio", 100), from_width=120),
    Column(header="theory %", cell=_metric("pipeline.predicted_bubble_ratio", 100)),
    Column(header="in flight", cell=_in_flight, from_width=120),
)


def columns(results: Sequence[Result]) -> tuple[Column, ...]:
    """The columns of one workload's results; those of a pipeline where one of them is."""
    unit, has_pipeline = unit_of(results), any(result.case.layout.pipeline > 1 for result in results)
    return (
        Column(header="implementation", cell=_label, numeric=False),
        Column(header="layout", cell=_where, numeric=False),
        Column(header=f"{unit}/s", cell=_metric(f"throughput.{unit}_per_second")),
        Column(header="step ms", cell=_metric("step.median_seconds", 1e3)),
        Column(header="peak MiB", cell=_metric("memory.peak_allocated_bytes.max_rank", 1 / _MIB)),
        Column(header="plan MiB", cell=_metric("memory.predicted_peak_bytes", 1 / _MIB), from_width=100),
        Column(header="sent MiB", cell=_metric("communication.bytes_per_step", 1 / _MIB)),
        Column(header="textbook MiB", cell=_metric("communication.textbook_bytes_per_step", 1 / _MIB), from_width=160),
        Column(header="busy %", cell=_metric("communication.busy_ratio", 100), from_width=100),
        Column(header="exposed %", cell=_metric("communication.exposed_ratio", 100)),
        Column(header="blocked %", cell=_metric("communication.blocked_ratio", 100), from_width=140),
        Column(header="CPU s/step", cell=_metric("cpu.seconds_per_step"), from_width=140),
        *(PIPELINE_COLUMNS if has_pipeline else ()),
        Column(header="parity", cell=_parity, numeric=False),
        Column(header="status", cell=lambda result: result.shown_status, numeric=False),
    )


def _ratio(name: str, scale: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: figure(row.get(name), scale)


def _parity_of_row(row: Mapping[str, Any]) -> str:
    verdict = "FAILED" if row.get("parity") == "failed" else str(row.get("parity", "-"))
    return f"{verdict}, other work" if row.get("other_work") else verdict


def _best_peer(row: Mapping[str, Any]) -> str:
    unchecked = ", parity not checked" if row.get("best_peer_parity") == "not checked" else ""
    return f"{row.get('best_peer') or '-'}{unchecked}"


RATIO_COLUMNS = (
    Column(header="implementation", cell=lambda row: str(row["implementation"]), numeric=False),
    Column(header="whose", cell=lambda row: _WHOSE.get(row.get("role"), "-"), numeric=False),
    Column(header="ranks", cell=lambda row: str(row["world_size"])),
    Column(header="step ms", cell=_ratio("median_seconds", 1e3)),
    Column(header="floor ms", cell=_ratio("floor_seconds", 1e3), from_width=120),
    Column(header="best peer", cell=_best_peer, numeric=False, from_width=100),
    Column(header="time / peer", cell=_ratio("ratio")),
    Column(header="time / floor", cell=_ratio("floor_ratio")),
    Column(header="overhead / peer", cell=_ratio("overhead_ratio")),
    Column(header="spread", cell=_ratio("spread")),
    Column(header="rounds", cell=lambda row: str(row.get("rounds", "-")), from_width=120),
    Column(header="parity", cell=_parity_of_row, numeric=False),
)
_RATIO_TERMS = (
    "time / peer: over the fastest setting of the best peer; below 1 is faster. time / floor: over the same work "
    "without communication. overhead / peer: (own - floor) / (peer - floor). {}parity: against one process; not "
    "checked where a case has no parity steps. other work: its options depart from the recipe; nobody's best peer."
)
RATIO_MEANING = "Medians of steps timed in rounds that took turns. " + _RATIO_TERMS.format(
    "spread: between the quartiles of the rounds' own time / peer. "
)
RATIO_MEANING_WITHOUT_TURNS = (
    "Medians of steps timed one case after another: whatever the machine did otherwise meanwhile is in the ratios, and "
    "nothing tells how much of them it is. "
) + _RATIO_TERMS.format("")


def by_workload(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results under their workload, precision and comparison, in the order they came."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        case = result.case
        title = ", ".join(filter(None, (case.workload, case.precision, case.comparison)))
        groups.setdefault(title, []).append(result)
    return groups


def table(title: str, results: Sequence[Result], width: int = 100) -> Table:
    """The table of one workload for a terminal of `width` columns."""
    return _table(title, columns(results), results, width)


def read_ratios(directory: Path) -> list[dict[str, Any]]:
    """The ratio table of an interleaved suite, empty where there is none. ValueError if the file is broken."""
    path = directory / RATIOS_FILE
    if not path.is_file():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON list of ratios, got {error}") from error
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"strategy", "implementation", "world_size"} <= row.keys() for row in rows
    ):
        raise ValueError(f"{path}: expected a list of rows with strategy, implementation and world_size")
    return rows


def ratio_groups(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows under their strategy, workload, precision and comparison."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        parts = [row.get(name) for name in ("strategy", "workload", "precision", "comparison")]
        title = ", ".join(dict.fromkeys(str(part) for part in parts if part))
        groups.setdefault(title, []).append(row)
    return groups


def text(
    results: Sequence[Result], ratios: Sequence[Mapping[str, Any]], directory: Path, width: int = 100
) -> RenderableType:
    """The whole report for a terminal of `width` columns."""
    parts: list[RenderableType] = []
    for title, group in by_workload(results).items():
        parts.append(table(title, group, width))
        parts += [Text(line, style="dim") for line in unpredicted(group)]
    for result in results:
        parts += [Text(line, style="yellow") for line in departures(result)]
        if result.status != "ok":
            first, *rest = reasons(result)
            parts.append(Text(first, style=STATUS_STYLES[result.shown_status]))
            parts += [Text(f"  {line}") for line in rest]
            if result.traceback:
                parts.append(Text(f"  traceback: {directory / REPORT_FILE}"))
    for title, rows in ratio_groups(ratios).items():
        parts.append(_ratio_table(f"ratios: {title}", rows, width))
    if ratios:
        parts.append(Text(RATIO_MEANING, style="dim"))
    parts.append(Text(""))
    parts += [Text(line) for line in (*measured_on(results), *where_to_look(directory))]
    return Group(*parts)


def markdown(results: Sequence[Result], ratios: Sequence[Mapping[str, Any]], directory: Path) -> str:
    """The whole report as Markdown, with the columns that a terminal has no room for and with tracebacks."""
    lines = [f"# {plain(_title(results))}", ""]
    for title, group in by_workload(results).items():
        lines += [f"## {plain(title)}", "", *_markdown_table(columns(group), group), ""]
        if empty := unpredicted(group):
            lines += [*(f"- {plain(line)}" for line in empty), ""]
    if not_ok := [result for result in results if result.status != "ok"]:
        lines += ["## Not ok", ""]
        for result in not_ok:
            first, *rest = reasons(result)
            lines += [f"- {plain(first)}", *(f"  - {plain(line)}" for line in rest)]
            if result.traceback:
                lines += ["", *fenced(result.traceback), ""]
        lines.append("")
    for title, rows in ratio_groups(ratios).items():
        lines += [f"## Ratios: {plain(title)}", "", *_markdown_table(RATIO_COLUMNS, rows), ""]
    if ratios:
        lines += [RATIO_MEANING, ""]
    if notes := [line for result in results for line in departures(result)]:
        lines += ["## Other than asked", "", *(f"- {plain(line)}" for line in notes), ""]
    lines += [
        "## Where to look",
        "",
        *(f"- {plain(line)}" for line in (*measured_on(results), *where_to_look(directory))),
    ]
    return "\n".join(lines) + "\n"


def write(directory: Path, results: Sequence[Result]) -> Path:
    """Write the Markdown report beside the results."""
    path = directory / REPORT_FILE
    path.write_text(markdown(results, read_ratios(directory), directory), encoding="utf-8")
    return path


def where_to_look(directory: Path) -> list[str]:
    return [
        f"results: {directory / RESULTS_FILE}",
        f"in the browser: {_where_mlflow_is()}{MLFLOW_COMMAND}  (or at your MLFLOW_TRACKING_URI)",
    ]


def _where_mlflow_is() -> str:
    """The directory to type before `mlflow` where the shell would not find it: nox leaves it in .venv/bin."""
    beside = Path(sys.executable).with_name("mlflow")
    return "" if shutil.which("mlflow") or not beside.exists() else f"{os.path.relpath(beside.parent)}/"


def is_success(results: Sequence[Result]) -> bool:
    """Whether every case is ok, could not be run here for a reason of its own, or parts as it was expected to."""
    return all(result.is_harmless for result in results)


def _title(results: Sequence[Result]) -> str:
    names = list(dict.fromkeys(result.suite for result in results if result.suite))
    return " and ".join(names) or "Results"


def _table(title: str, all_columns: Sequence[Column], rows: Sequence[Any], width: int) -> Table:
    shown = [column for column in all_columns if column.from_width <= width]
    made = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0))
    for column in shown:
        made.add_column(
            "\n".join(column.header.rsplit(" ", 1)) if column.numeric else column.header,
            justify="right" if column.numeric else "left",
            no_wrap=column.numeric,
            overflow="fold",
            max_width=16 if column.header == "parity" else None,
        )
    for row in rows:
        cells = [column.cell(row) for column in shown]
        made.add_row(*(Text(cell, style=_cell_style(cell)) for cell in cells))
    return made


def _ratio_table(title: str, rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Ours in bold, a line between world sizes."""
    made = _table(title, RATIO_COLUMNS, rows, width)
    for index, row in enumerate(rows):
        if row.get("role") == "subject":
            made.rows[index].style = "bold"
        if index + 1 < len(rows) and rows[index + 1]["world_size"] != row["world_size"]:
            made.rows[index].end_section = True
    return made


def _cell_style(cell: str) -> str:
    return "bold red" if cell.startswith("FAILED") else STATUS_STYLES.get(cell, "")


def _markdown_table(shown: Sequence[Column], rows: Sequence[Any]) -> list[str]:
    return [
        plain_row([column.header for column in shown]),
        plain_row(["---:" if column.numeric else "---" for column in shown]),
        *(plain_row([column.cell(row) for column in shown]) for row in rows),
    ]
