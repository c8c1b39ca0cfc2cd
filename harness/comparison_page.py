"""A page that compares strategies, generated from a run: what each costs in memory, on the wire, in latencies, in time
and in lines, each measured figure beside its closed form. Nothing on it comes from anywhere but the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from harness.comparison import Comparison, Row, comparisons
from harness.library_matrix import Cell, Line, matrix
from harness.markdown import code, plain, plain_row, table_row
from harness.provenance import provenance
from harness.ratios import ratio_rows
from harness.reasons import beyond_the_textbook, departures, reasons, shown_parity, unpredicted
from harness.report import (
    RATIO_COLUMNS,
    RATIO_MEANING,
    RATIO_MEANING_WITHOUT_TURNS,
    Column,
    figure,
    ratio_groups,
    unit_of,
)
from harness.result import Result

_MIB = 2**20
_CATEGORIES = {
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer states",
    "communication_buffer_bytes": "communication buffers",
    "activation_bytes": "activations",
    "other_bytes": "other",
}
_SENDS_MORE = 1.1
MATRIX_MEANING = (
    "The median step of each library's fastest setting that trains the reference's model by its recipe, and in "
    "brackets over that of the best peer: below 1 is faster."
)
LETTERS_MEANING = "A letter marks a setting that is not the default: which one is said below."
TRANSPORTS_MEANING = (
    "Over the process group, as everybody's, what a library gains is its algorithm's; over memory that the ranks of a "
    "machine share it is the transport's too."
)
LEGEND = (
    "step / best peer: the median step over that of the fastest peer of the same strategy which trains the same model "
    "by the same recipe",
    "states: parameters, gradients and optimizer states of the rank that holds most of each, measured; predicted: the "
    "strategy's closed form of them",
    "by category: the states one by one, and what a step needs beside them, each at its own largest, wherever in the "
    "step that is; in brackets what was predicted. -: a library's own buffers, which the instrument cannot "
    "tell from the rest",
    "peak: the most bytes allocated at once, measured; predicted: the closed form, and a dry run for what one "
    "micro-batch needs beside it",
    "sent: what one rank puts on the wire in a step, measured, of the rank that sends most; predicted: the closed form "
    "of the algorithm that this implementation runs; textbook: that of its strategy, whoever implements it (data "
    "parallel, ZeRO 1 and 2: 2(N-1)/N of the gradients, ZeRO 3: 3(N-1)/N, where they are as wide as parameters and "
    "come in one micro-batch; of m, ZeRO 2: (m+1)(N-1)/N, ZeRO 3: 3m(N-1)/N; tensor parallel and pipeline: what layers "
    "sum, or hand over a border). It is no verdict: nobody has to send just that",
    "collectives: the operations of a step; a send and a receive are one each",
    "busy %: the part of a step in which at least one collective is in flight",
    "exposed %: the part of a step that would be saved if communication cost nothing",
    "latencies: how many latencies of the link a step waits for one after another: what it gets longer by when every "
    "operation is launched d later, over d",
    "lines changed: the logical lines by which our use of a peer (`__init__` and `train_step` of its implementation "
    "here) differs from the same of plain training in one process; a call counts as itself. What passes options on, "
    "hooks and measuring the norm are among them: it is no count of what a user would change. Ours are libraries, and "
    "have none",
    "parity: against one process, see the README. not checked: the case has no parity steps. other work: its options "
    "depart from the recipe, as said below; such a peer is nobody's best",
)


def page(results: Sequence[Result], *paths: Path) -> str:
    """The page as Markdown; `paths` are where the results were read from."""
    suites = list(dict.fromkeys(result.suite for result in results if result.suite))
    lines = [f"# {' and '.join(suites) or 'Cases'}: strategies compared", ""]
    if lines_of_matrix := matrix(results):
        lines += ["## Strategies and libraries", "", matrix_meaning(lines_of_matrix), ""]
        lines += [*matrix_table(lines_of_matrix), ""]
    rows = ratio_rows(results)
    if timed := [row for row in rows if row["in_turns"]]:
        lines += ["## Timed in turns", "", RATIO_MEANING, "", *_ratio_tables(timed)]
    if timed := [row for row in rows if not row["in_turns"]]:
        lines += ["## Timed one after another", "", RATIO_MEANING_WITHOUT_TURNS, "", *_ratio_tables(timed)]
    for comparison in comparisons(results):
        lines += [f"## {comparison.title}", "", *(f"- {text}" for text in sentences(comparison)), ""]
        lines += [*_table(columns(comparison), comparison.rows), ""]
        if more := beyond_the_textbook(row.result for row in comparison.rows if _sends_more(row)):
            lines += [*(f"- {plain(line)}" for line in more), ""]
        if empty := unpredicted(row.result for row in comparison.rows):
            lines += [*(f"- {plain(line)}" for line in empty), ""]
    notes = ["; ".join(reasons(result)) for result in results if result.status != "ok"]
    notes += [line for result in results for line in departures(result)]
    if notes:
        lines += ["## Not as asked", "", *(f"- {plain(note)}" for note in notes), ""]
    lines += ["## What the columns say", "", *(f"- {text}" for text in LEGEND), ""]
    lines += ["## Where the figures come from", "", *(f"- {text}" for text in provenance(results, *paths))]
    return "\n".join(lines) + "\n"


def sentences(comparison: Comparison) -> list[str]:
    """What the table says, in words: each rival beside the first, the least first. A sentence whose figures are not
    known is left out."""
    rivals = comparison.rivals
    said = [
        _shares(rivals, lambda row: row.state_bytes, "a rank holds {} MiB of states"),
        _shares(rivals, lambda row: row.metric("communication.bytes_per_step"), "a rank sends {} MiB a step"),
        _listed(
            rivals,
            lambda row: row.metric("communication.exposed_latencies_per_step"),
            lambda value: f"{value:.1f}",
            "a step waits for {} latencies of the link, one after another,",
        ),
        _listed(
            rivals,
            lambda row: row.metric("code.changed_lines"),
            _count,
            "our use of a peer differs from plain training in one process by {} lines",
        ),
    ]
    return [text for text in said if text is not None]


def columns(comparison: Comparison) -> tuple[Column, ...]:
    """Those of one table."""
    unit = unit_of([row.result for row in comparison.rows])
    return (
        Column(header="implementation", cell=lambda row: row.name, numeric=False),
        Column(header=f"{unit}/s", cell=lambda row: figure(row.metric(f"throughput.{unit}_per_second"))),
        Column(header=f"step / {comparison.baseline}", cell=lambda row: figure(row.step_ratio)),
        Column(header="step / best peer", cell=_over_peer),
        Column(header="states MiB", cell=lambda row: figure(row.state_bytes, 1 / _MIB)),
        Column(header="states predicted", cell=lambda row: figure(row.predicted_state_bytes, 1 / _MIB)),
        Column(header="by category MiB", cell=_by_category, numeric=False),
        Column(header="peak MiB", cell=_mib("memory.peak_allocated_bytes.max_rank")),
        Column(header="peak predicted", cell=_mib("memory.predicted_peak_bytes")),
        Column(header="sent MiB", cell=_mib("communication.bytes_per_step")),
        Column(header="sent predicted", cell=_mib("communication.predicted_bytes_per_step")),
        Column(header="textbook MiB", cell=_mib("communication.textbook_bytes_per_step")),
        Column(header="collectives", cell=lambda row: _count(row.metric("communication.calls_per_step"))),
        Column(header="busy %", cell=lambda row: figure(row.metric("communication.busy_ratio"), 100)),
        Column(header="exposed %", cell=lambda row: figure(row.metric("communication.exposed_ratio"), 100)),
        Column(header="latencies", cell=lambda row: figure(row.metric("communication.exposed_latencies_per_step"))),
        Column(header="lines changed", cell=lambda row: _count(row.metric("code.changed_lines"))),
        Column(header="parity", cell=_parity, numeric=False),
    )


def _over_peer(row: Row) -> str:
    unchecked = row.best_peer is not None and row.best_peer.parity_verdict == "not checked"
    return figure(row.peer_ratio) + (", its parity not checked" if unchecked else "")


def _sends_more(row: Row) -> bool:
    """Than the textbook by more than a stage's padding, or a norm, can be."""
    sent, textbook = (row.metric(f"communication.{name}bytes_per_step") for name in ("", "textbook_"))
    return sent is not None and textbook is not None and sent > _SENDS_MORE * textbook


def _by_category(row: Row) -> str:
    parts = []
    for name, text in _CATEGORIES.items():
        measured, predicted = row.metric(f"memory.{name}"), row.metric(f"memory.predicted_{name}")
        if measured or predicted:
            form = "" if predicted is None else f" (predicted {figure(predicted, 1 / _MIB)})"
            parts.append(f"{text} {figure(measured, 1 / _MIB)}{form}")
    return ", ".join(parts) or "-"


def _parity(row: Row) -> str:
    return shown_parity(row.result, {"ok": "ok", "failed": "FAILED"})


def _mib(name: str) -> Callable[[Row], str]:
    return lambda row: figure(row.metric(name), 1 / _MIB)


def _count(value: float | None) -> str:
    """Whole numbers as they are."""
    return f"{value:,.0f}" if value is not None and value == int(value) else figure(value)


def _shares(rows: Sequence[Row], value_of: Callable[[Row], float | None], text: str) -> str | None:
    """`text` with the first row's value, then the others' shares of it."""
    base = value_of(rows[0]) if rows else None
    if not base:
        return None
    others = _by_value(rows[1:], value_of, lambda value: f"{value / base:.2f}")
    first = f"{_capital(text.format(figure(base, 1 / _MIB)))} under {_names(rows[:1])}"
    return (
        f"{first}{'; of that ' if others else ''}{_joined(f'{share} under {_names(same)}' for share, same in others)}."
    )


def _listed(
    rows: Sequence[Row], value_of: Callable[[Row], float | None], written: Callable[[float], str], text: str
) -> str | None:
    """`text` with the least value and whose it is, then the others' values."""
    groups = _by_value(rows, value_of, written)
    if not groups:
        return None
    (least, first), *others = groups
    rest = _joined(f"{value} under {_names(same)}" for value, same in others)
    return f"{_capital(text.format(least))} under {_names(first)}{'; ' if others else ''}{rest}."


def _by_value(
    rows: Sequence[Row], value_of: Callable[[Row], float | None], written: Callable[[float], str]
) -> list[tuple[str, list[Row]]]:
    """The rows whose value is known under that value as it is written, the least first."""
    known = [(value, row) for row in rows if (value := value_of(row)) is not None]
    groups: dict[str, list[Row]] = {}
    for value, row in sorted(known, key=lambda pair: pair[0]):
        groups.setdefault(written(value), []).append(row)
    return list(groups.items())


def _names(rows: Sequence[Row]) -> str:
    return _joined(code(row.name) for row in rows)


def _joined(parts: Iterable[str]) -> str:
    *most, last = [*parts] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def matrix_meaning(lines: Sequence[Line]) -> str:
    """What the table of the matrix says."""
    has_transports = any("shared memory" in name for name in lines[0].cells)
    has_letters = any(cell.setting for line in lines for cell in line.cells.values())
    more = [*([LETTERS_MEANING] if has_letters else []), *([TRANSPORTS_MEANING] if has_transports else [])]
    return " ".join([MATRIX_MEANING, *more])


def matrix_table(lines: Sequence[Line]) -> list[str]:
    """One column for each library, and below what the letters in the cells stand for."""
    names = list(lines[0].cells)
    settings = dict.fromkeys(cell.setting for line in lines for cell in line.cells.values() if cell.setting)
    letters = dict(zip(settings, ascii_lowercase, strict=False))

    def shown(cell: Cell) -> str:
        return f"{cell.text} {letters.get(cell.setting, code(cell.setting))}" if cell.setting else cell.text

    def cell_of(name: str) -> Callable[[Line], str]:
        return lambda line: shown(line.cells[name])

    table = (
        Column(header="strategy", cell=lambda line: line.strategy, numeric=False),
        Column(header="work", cell=lambda line: line.work, numeric=False),
        *(Column(header=name, cell=cell_of(name)) for name in names),
    )
    notes = "; ".join(f"{letter}: {code(setting)}" for setting, letter in letters.items())
    return [*_table(table, lines, line=table_row), *(["", notes] if notes else [])]


def _ratio_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ratio tables of the report, one for each strategy and work."""
    lines = []
    for title, members in ratio_groups(rows).items():
        lines += [f"### {title}", "", *_table(RATIO_COLUMNS, members), ""]
    return lines


def _table(shown: Sequence[Column], rows: Sequence[Any], line: Callable[[Sequence[str]], str] = plain_row) -> list[str]:
    """`line` makes one of the cells: as plain text, unless they are Markdown already."""
    return [
        line([column.header for column in shown]),
        line(["---:" if column.numeric else "---" for column in shown]),
        *(line([column.cell(row) for column in shown]) for row in rows),
    ]
