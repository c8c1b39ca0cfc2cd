"""A page about topologies, generated from a run: what links between nodes leave of each strategy's throughput on one
node, what each puts on them beside the closed form, and how much of a step waits. Every sentence is made of the
figures; where they say the opposite of what is usually said, so does the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from harness.case import Case
from harness.comparison import is_measured
from harness.comparison_page import provenance
from harness.layout import Axis
from harness.reasons import reasons
from harness.report import figure, unit_of
from harness.result import Result
from harness.topology import Placement

BYTES_TOLERANCE = 0.03
_MB = 1e-6
_SENT = "communication.node_wire_bytes_per_step"
_FORESEEN = "communication.predicted_node_wire_bytes_per_step"
_EXPOSED = "communication.exposed_ratio"
_AXES: tuple[tuple[Axis, str], ...] = (("shard", "shard groups"), ("tensor", "tensor groups"), ("pipeline", "stages"))
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


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A result on several nodes beside the one on one node."""

    result: Result
    alone: Result

    @property
    def name(self) -> str:
        return _name(self.result.case)

    @property
    def throughput(self) -> float:
        """The part of the throughput that is left."""
        return _seconds(self.alone) / _seconds(self.result)

    @property
    def sent_bytes(self) -> float:
        return self.result.metrics.get(_SENT, 0.0)


def spans_topologies(results: Sequence[Result]) -> bool:
    """Whether a run is about topologies: some case on one node, and on several."""
    nodes = {result.case.placed.num_nodes for result in results if _is_timed(result)}
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
        lines += ["", "## Not as asked", "", *(f"- {note}" for note in notes)]
    lines += ["", "## What the figures say", "", *(f"- {text}" for text in _MEANING)]
    lines += ["", "## Where they come from", "", *(f"- {text}" for text in provenance(results, *paths))]
    return "\n".join(lines) + "\n"


def sentences(results: Sequence[Result]) -> list[str]:
    """What the figures say in words: of the slowest link between nodes of several ranks, then of all bytes."""
    said: list[str] = []
    kept = _kept_on_slowest(results)
    if kept:
        where = _where(kept[0].result.case)
        said += [text for axis, text_of in _AXES if (text := _inside_or_across(kept, axis, text_of, where))]
        said += _extremes(kept, where)
        said += _levels(kept, where)
    judged = [r for r in results if _is_timed(r) and _apart(r) is not None]
    if judged:
        within = [r for r in judged if (_apart(r) or 0.0) <= BYTES_TOLERANCE]
        farthest = max(judged, key=lambda r: _apart(r) or 0.0)
        said.append(
            f"{len(within)} of {len(judged)} cases put within {BYTES_TOLERANCE:.0%} of the closed form on a node's "
            f"link; farthest is {_name(farthest.case)} on {farthest.case.placed} with {_apart(farthest):.1%}."
        )
    return said


def _inside_or_across(kept: Sequence[Kept], axis: Axis, groups: str, where: str) -> str | None:
    """Cases whose groups along `axis` lie inside nodes beside those of the same strategies whose groups span them."""
    concerned = [each for each in kept if _uses(each.result, axis)]
    inside = [each for each in concerned if _lies_inside(each.result.case, axis)]
    across = [each for each in concerned if each not in inside]
    both = {each.result.strategy for each in inside} & {each.result.strategy for each in across}
    if not both:
        return None
    inside, across = ([each for each in way if each.result.strategy in both] for way in (inside, across))
    of_inside, of_across = ([each.throughput for each in way] for way in (inside, across))
    verdict = "neither keeps more throughout"
    if min(of_inside) > max(of_across):
        verdict = "every case inside keeps more than any across"
    elif min(of_across) > max(of_inside):
        verdict = "every case across keeps more than any inside"
    return f"{where}, {groups} inside nodes: {_told(inside)}; {groups} across nodes: {_told(across)}; {verdict}."


def _extremes(kept: Sequence[Kept], where: str) -> list[str]:
    by_bytes = sorted(kept, key=lambda each: each.sent_bytes)
    by_throughput = sorted(kept, key=lambda each: each.throughput)
    return [
        f"{where}, least leaves a node under {_with_bytes(by_bytes[0])}, then under {_with_bytes(by_bytes[1])}; most "
        f"under {_with_bytes(by_bytes[-1])}.",
        f"{where}, most is lost by {_told(by_throughput[:2])}, least by {_told(by_throughput[-2:][::-1])}.",
    ]


def _levels(kept: Sequence[Kept], where: str) -> list[str]:
    """Cases that took their group in two levels beside the same ones in one."""
    said = []
    for two in kept:
        facts = two.result.environment.get("facts") or {}
        if "levels" not in facts:
            continue
        for one in kept:
            if _is_other_way(two.result.case, one.result.case) and "levels" not in (
                one.result.environment.get("facts") or {}
            ):
                gain = _seconds(one.result) / _seconds(two.result)
                said.append(
                    f"{where}, {two.name} in two levels ({facts['levels']}) sends {_megabytes(two)} from a node, in "
                    f"one {_megabytes(one)}; its step is {gain:.2f} times as fast."
                )
    return said


def _is_other_way(a: Case, b: Case) -> bool:
    """The same work on the same machines by the same implementation, one of them with further options."""
    same = (a.workload, a.layout, a.placed, a.precision, a.implementation)
    return same == (b.workload, b.layout, b.placed, b.precision, b.implementation) and (
        a.options.items() < b.options.items()
    )


def _kept_on_slowest(results: Sequence[Result]) -> list[Kept]:
    """On the topology of several nodes with several ranks each whose link is slowest."""
    timed = [result for result in results if _is_timed(result)]
    alone = {_way(r.case): r for r in timed if r.case.placed.num_nodes == 1}
    several = [r for r in timed if r.case.placed.num_nodes > 1 and r.case.placed.ranks_per_node > 1]
    rates = [r.case.placed.link_mbits for r in several if r.case.placed.link_mbits is not None]
    slowest = min(rates, default=None)
    return [
        Kept(result=r, alone=alone[_way(r.case)])
        for r in several
        if r.case.placed.link_mbits == slowest and _way(r.case) in alone
    ]


def _uses(result: Result, axis: Axis) -> bool:
    layout = result.case.layout
    if axis == "shard":
        return result.strategy.startswith("zero") and layout.shard_degree > 1 and layout.tensor == layout.pipeline == 1
    return len(layout.groups(axis)[0]) > 1


def _lies_inside(case: Case, axis: Axis) -> bool:
    return all(case.seats.on_one_node(group) for group in case.layout.groups(axis))


def _apart(result: Result) -> float | None:
    """By how much the bytes a node sent differ from the closed form, as a part of that."""
    sent, foreseen = result.metrics.get(_SENT), result.metrics.get(_FORESEEN)
    return None if sent is None or not foreseen else abs(sent / foreseen - 1)


def _rows(results: Sequence[Result]) -> list[Row]:
    """One for each way, and each placement of it; what ran on one node stands in all of them."""
    rows: dict[str, Row] = {}
    alone: dict[tuple[str, ...], Result] = {}
    for result in filter(_is_timed, results):
        if result.case.placed.num_nodes == 1:
            alone[_way(result.case)] = result
    for result in filter(_is_timed, results):
        if result.case.placed.num_nodes > 1:
            name = _name(result.case)
            row = rows.setdefault(name, Row(name=name, by_topology={}))
            row.by_topology[_where(result.case)] = result
            if (here := alone.get(_way(result.case))) is not None:
                row.by_topology[_where(here.case)] = here
    return list(rows.values())


def _topologies(results: Sequence[Result]) -> dict[str, int]:
    """Nodes, ranks and link of all cases, with the number of nodes: few nodes first, fast links first."""
    placed = {result.case.placed for result in results if _is_timed(result)}
    ordered = sorted(placed, key=lambda t: (t.num_nodes, -(t.link_mbits or float("inf")), t.delay_ms))
    return {_topology_name(topology.num_nodes, str(topology)): topology.num_nodes for topology in ordered}


def _where(case: Case) -> str:
    return _topology_name(case.placed.num_nodes, str(case.placed))


def _topology_name(num_nodes: int, text: str) -> str:
    """Without the placement, which is part of a row."""
    words = text.split()
    return " ".join(word for word in words if word not in get_args(Placement)) if num_nodes > 1 else words[0]


def _way(case: Case) -> tuple[str, ...]:
    return (case.label, str(case.layout), case.workload, case.precision)


def _name(case: Case) -> str:
    placement = "" if case.placed.placement == "contiguous" else f", {case.placed.placement}"
    return f"`{case.label}` ({case.layout}{placement})"


def _is_timed(result: Result) -> bool:
    return is_measured(result) and result.status == "ok" and "step.median_seconds" in result.metrics


def _seconds(result: Result) -> float:
    return result.metrics["step.median_seconds"]


def _told(kept: Iterable[Kept]) -> str:
    return ", ".join(f"{each.name} keeps {each.throughput:.2f} and sends {_megabytes(each)}" for each in kept)


def _with_bytes(kept: Kept) -> str:
    return f"{kept.name} ({_megabytes(kept)})"


def _megabytes(kept: Kept) -> str:
    return f"{figure(kept.sent_bytes, _MB)} MB"


def _speed(row: Row, unit: str) -> str:
    alone = [r for r in row.by_topology.values() if r.case.placed.num_nodes == 1]
    return figure(statistics.mean(r.metrics[f"throughput.{unit}_per_second"] for r in alone)) if alone else "-"


def _kept_cell(row: Row, topology: str) -> str:
    result = row.by_topology.get(topology)
    alone = next((r for r in row.by_topology.values() if r.case.placed.num_nodes == 1), None)
    return "-" if result is None or alone is None else f"{_seconds(alone) / _seconds(result):.2f}"


def _sent_cell(row: Row, topology: str) -> str:
    result = row.by_topology.get(topology)
    if result is None or _SENT not in result.metrics:
        return "-"
    apart = _apart(result)
    form = "" if apart is None else f" ({figure(result.metrics[_FORESEEN], _MB)})"
    return figure(result.metrics[_SENT], _MB) + form + ("!" if (apart or 0.0) > BYTES_TOLERANCE else "")


def _exposed_cell(row: Row, topology: str) -> str:
    result = row.by_topology.get(topology)
    return "-" if result is None else figure(result.metrics.get(_EXPOSED), 100)


def _cells(cell: Callable[[Row, str], str], topologies: Sequence[str]) -> Callable[[Row], list[str]]:
    return lambda row: [cell(row, topology) for topology in topologies]


def _table(heads: Sequence[str], rows: Sequence[Row], cells_of: Callable[[Row], Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(("way", *heads)) + " |",
        "| " + " | ".join(("---", *("---:" for _ in heads))) + " |",
        *("| " + " | ".join((row.name, *cells_of(row))) + " |" for row in rows),
    ]
