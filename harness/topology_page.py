"""A page about topologies, generated from a run: what links between nodes leave of each strategy's throughput on one
node, what each puts on them beside the closed form, and how much of a step waits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.markdown import plain, table_row
from harness.node_bytes import FORESEEN, SENT, TOLERANCE, apart
from harness.provenance import provenance
from harness.reasons import reasons
from harness.report import figure, unit_of
from harness.result import Result
from harness.topology_sentences import (
    MEGA,
    is_timed,
    name_of,
    seconds_of,
    sentences,
    topology_name,
    way_of,
    where_of,
)

_EXPOSED = "communication.exposed_ratio"
_MEANING = (
    "kept: throughput over that of the same case on one node, measured in the same run. Emulated nodes share the "
    "processors of one machine: read ratios and bytes, never times",
    "sent: what the node that sends most puts on its link in a step, headers and acknowledgements included, by the "
    "kernel's counters; in brackets the closed form; `!` where they are more than 3 % apart",
    "exposed: the part of a step that would be saved if communication cost nothing",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train, on whatever machines: `by_topology` has its results by nodes, ranks and link."""

    name: str
    by_topology: dict[str, Result]


def spans_topologies(results: Sequence[Result]) -> bool:
    """Whether a run is about topologies: some case on one node, and on several."""
    nodes = {result.case.placed.num_nodes for result in results if is_timed(result)}
    return 1 in nodes and len(nodes) > 1


def page(results: Sequence[Result], *paths: Path) -> str:
    """The page as Markdown; `paths` are where the results were read from."""
    rows, topologies = _rows(results), _topologies(results)
    several = [name for name, nodes in topologies.items() if nodes > 1]
    unit = unit_of(results)
    lines = ["# Topologies: what links between nodes cost", "", *(f"- {text}" for text in sentences(results)), ""]
    lines += ["## Throughput kept", ""]
    heads = [f"{unit}/s on one node", *several]
    lines += _table(heads, rows, lambda row: [_speed(row, unit), *(_kept_cell(row, name) for name in several)])
    for title, cell in (("MB a node sends in a step", _sent_cell), ("Exposed communication, %", _exposed_cell)):
        heads = several if cell is _sent_cell else list(topologies)
        lines += ["", f"## {title}", "", *_table(heads, rows, _cells(cell, heads))]
    notes = dict.fromkeys("; ".join(reasons(result)) for result in results if result.status != "ok")
    if notes:
        lines += ["", "## Not as asked", "", *(f"- {plain(note)}" for note in notes)]
    lines += ["", "## What the figures say", "", *(f"- {text}" for text in _MEANING)]
    lines += ["", "## Where they come from", "", *(f"- {text}" for text in provenance(results, *paths))]
    return "\n".join(lines) + "\n"


def _rows(results: Sequence[Result]) -> list[Row]:
    """One for each way, and each placement of it; what ran on one node stands in all of them."""
    rows: dict[str, Row] = {}
    alone: dict[tuple[str, ...], Result] = {}
    for result in filter(is_timed, results):
        if result.case.placed.num_nodes == 1:
            alone[way_of(result.case)] = result
    for result in filter(is_timed, results):
        if result.case.placed.num_nodes > 1:
            name = name_of(result.case)
            row = rows.setdefault(name, Row(name=name, by_topology={}))
            row.by_topology[where_of(result.case)] = result
            if (here := alone.get(way_of(result.case))) is not None:
                row.by_topology[where_of(here.case)] = here
    return list(rows.values())


def _topologies(results: Sequence[Result]) -> dict[str, int]:
    """Nodes, ranks and link of all cases, with the number of nodes: few nodes first, fast links first."""
    placed = {result.case.placed for result in results if is_timed(result)}
    ordered = sorted(placed, key=lambda t: (t.num_nodes, -(t.link_mbits or float("inf")), t.delay_ms))
    return {topology_name(topology.num_nodes, str(topology)): topology.num_nodes for topology in ordered}


def _speed(row: Row, unit: str) -> str:
    alone = [r for r in row.by_topology.values() if r.case.placed.num_nodes == 1]
    return figure(statistics.mean(r.metrics[f"throughput.{unit}_per_second"] for r in alone)) if alone else "-"


def _kept_cell(row: Row, topology: str) -> str:
    result = row.by_topology.get(topology)
    alone = next((r for r in row.by_topology.values() if r.case.placed.num_nodes == 1), None)
    return "-" if result is None or alone is None else f"{seconds_of(alone) / seconds_of(result):.2f}"


def _sent_cell(row: Row, topology: str) -> str:
    result = row.by_topology.get(topology)
    if result is None or SENT not in result.metrics:
        return "-"
    difference = apart(result.metrics)
    form = "" if difference is None else f" ({figure(result.metrics[FORESEEN], MEGA)})"
    return figure(result.metrics[SENT], MEGA) + form + ("!" if (difference or 0.0) > TOLERANCE else "")


def _exposed_cell(row: Row, topology: str) -> str:
    result = row.by_topology.get(topology)
    return "-" if result is None else figure(result.metrics.get(_EXPOSED), 100)


def _cells(cell: Callable[[Row, str], str], topologies: Sequence[str]) -> Callable[[Row], list[str]]:
    return lambda row: [cell(row, topology) for topology in topologies]


def _table(heads: Sequence[str], rows: Sequence[Row], cells_of: Callable[[Row], Sequence[str]]) -> list[str]:
    return [
        table_row(("way", *heads)),
        table_row(("---", *("---:" for _ in heads))),
        *(table_row((row.name, *cells_of(row))) for row in rows),
    ]
