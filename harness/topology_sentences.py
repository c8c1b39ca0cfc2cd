"""What a run over topologies says in words: every sentence is made of its figures; where they say the opposite of what
is usually said, so does the sentence."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from harness.case import Case
from harness.comparison import is_measured
from harness.layout import Axis
from harness.markdown import code
from harness.measure.timing import slowest_rank
from harness.node_bytes import SENT, TOLERANCE, apart
from harness.report import figure
from harness.result import Result
from harness.topology import Placement

MEGA = 1e-6
_FEWEST_STEPS = 4  # of which quartiles say something
_AXES: tuple[tuple[Axis, str], ...] = (("shard", "shard groups"), ("tensor", "tensor groups"), ("pipeline", "stages"))


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A result on several nodes beside the one on one node."""

    result: Result
    alone: Result

    @property
    def name(self) -> str:
        return name_of(self.result.case)

    @property
    def throughput(self) -> float:
        """The part of the throughput that is left."""
        return seconds_of(self.alone) / seconds_of(self.result)

    @property
    def sent_bytes(self) -> float:
        return self.result.metrics.get(SENT, 0.0)


def sentences(results: Sequence[Result]) -> list[str]:
    """What the figures say in words: of the slowest link between nodes of several ranks, then of all bytes."""
    said: list[str] = []
    kept = _kept_on_slowest(results)
    if kept:
        where = where_of(kept[0].result.case)
        said += [text for axis, text_of in _AXES if (text := _inside_or_across(kept, axis, text_of, where))]
        said += _extremes(kept, where)
        said += _levels(kept, where)
    spread = _spread(filter(is_timed, results))
    if spread is not None:
        said.append(
            f"Half of a case's steps lie within {spread:.0%} of each other, in the median over cases: figures that are "
            f"closer than that are alike."
        )
    held = [r for r in results if r.parity is not None]
    if held:
        num_held = sum(r.parity_verdict == "ok" for r in held)
        said.append(f"{num_held} of {len(held)} cases that were held against one process train its model.")
    judged = [r for r in results if is_timed(r) and apart(r.metrics) is not None]
    if judged:
        within = [r for r in judged if (apart(r.metrics) or 0.0) <= TOLERANCE]
        farthest = max(judged, key=lambda r: apart(r.metrics) or 0.0)
        said.append(
            f"{len(within)} of {len(judged)} cases put within {TOLERANCE:.0%} of the closed form on a node's "
            f"link; farthest is {name_of(farthest.case)} on {farthest.case.placed} with {apart(farthest.metrics):.1%}."
        )
    return said


def _inside_or_across(kept: Sequence[Kept], axis: Axis, groups: str, where: str) -> str | None:
    """Cases whose groups along `axis` lie inside nodes beside those of the same strategies and libraries whose groups
    span them, and are not taken in two levels. Whose step is slow on one node has little to lose to a link: a case is
    compared with those of its own library alone."""
    concerned = [each for each in kept if _uses(each.result, axis)]
    inside = [each for each in concerned if _lies_inside(each.result.case, axis)]
    across = [each for each in concerned if each not in inside and _levels_of(each) is None]
    both = {_kind(each) for each in inside} & {_kind(each) for each in across}
    if not both:
        return None
    inside, across = ([each for each in way if _kind(each) in both] for way in (inside, across))
    pairs = [(one.throughput, other.throughput) for one in inside for other in across if _kind(one) == _kind(other)]
    whose = " of its library" if len({library for _, library in both}) > 1 else ""
    verdict = "neither keeps more throughout"
    if all(of_inside > of_across for of_inside, of_across in pairs):
        verdict = f"every case inside keeps more than any across{whose}"
    elif all(of_across > of_inside for of_inside, of_across in pairs):
        verdict = f"every case across keeps more than any inside{whose}"
    return (
        f"{where}, {groups} inside nodes: {_told(inside)}; {groups} across nodes, in one level: {_told(across)}; "
        f"{verdict}."
    )


def _kind(each: Kept) -> tuple[str, str]:
    """Its strategy, and the library that is compared."""
    return str(each.result.strategy), each.result.case.implementation.partition(".")[0]


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
        for one in kept:
            is_pair = _levels_of(two) is not None and _levels_of(one) is None
            if is_pair and _is_other_way(two.result.case, one.result.case):
                gain = seconds_of(one.result) / seconds_of(two.result)
                said.append(
                    f"{where}, {two.name} in two levels ({_levels_of(two)}) keeps {two.throughput:.2f} and sends "
                    f"{_megabytes(two)}, in one {one.throughput:.2f} and {_megabytes(one)}: its step is {gain:.2f} "
                    f"times as fast."
                )
    return said


def _levels_of(kept: Kept) -> str | None:
    """What the implementation says of the two levels that it takes its groups in."""
    told: str | None = (kept.result.environment.get("facts") or {}).get("levels")
    return told


def _spread(results: Iterable[Result]) -> float | None:
    """The distance between the quartiles of a case's steps over their median: its own median over the cases."""
    found = []
    for result in results:
        of_ranks = result.samples.get("step_seconds") or [[]]
        if len(of_ranks[0]) >= _FEWEST_STEPS:
            seconds = slowest_rank(of_ranks)
            lower, middle, upper = statistics.quantiles(seconds, n=4)
            found.append((upper - lower) / middle)
    return statistics.median(found) if found else None


def _is_other_way(a: Case, b: Case) -> bool:
    """The same work on the same machines by the same implementation, one of them with further options."""
    same = (a.workload, a.layout, a.placed, a.precision, a.implementation)
    return same == (b.workload, b.layout, b.placed, b.precision, b.implementation) and (
        a.options.items() < b.options.items()
    )


def _kept_on_slowest(results: Sequence[Result]) -> list[Kept]:
    """On the topology of several nodes with several ranks each whose link is slowest."""
    timed = [result for result in results if is_timed(result)]
    alone = {way_of(r.case): r for r in timed if r.case.placed.num_nodes == 1}
    several = [r for r in timed if r.case.placed.num_nodes > 1 and r.case.placed.ranks_per_node > 1]
    rates = [r.case.placed.link_mbits for r in several if r.case.placed.link_mbits is not None]
    slowest = min(rates, default=None)
    return [
        Kept(result=r, alone=alone[way_of(r.case)])
        for r in several
        if r.case.placed.link_mbits == slowest and way_of(r.case) in alone
    ]


def _uses(result: Result, axis: Axis) -> bool:
    layout = result.case.layout
    if axis == "shard":
        return result.strategy.startswith("zero") and layout.shard_degree > 1 and layout.tensor == layout.pipeline == 1
    return len(layout.groups(axis)[0]) > 1


def _lies_inside(case: Case, axis: Axis) -> bool:
    return all(case.seats.on_one_node(group) for group in case.layout.groups(axis))


def where_of(case: Case) -> str:
    return topology_name(case.placed.num_nodes, str(case.placed))


def topology_name(num_nodes: int, text: str) -> str:
    """Without the placement, which is part of a row."""
    words = text.split()
    return " ".join(word for word in words if word not in get_args(Placement)) if num_nodes > 1 else words[0]


def way_of(case: Case) -> tuple[str, ...]:
    return (case.label, str(case.layout), case.workload, case.precision)


def name_of(case: Case) -> str:
    placement = "" if case.placed.placement == "contiguous" else f", {case.placed.placement}"
    return f"{code(case.label)} ({case.layout}{placement})"


def is_timed(result: Result) -> bool:
    return is_measured(result) and result.status == "ok" and "step.median_seconds" in result.metrics


def seconds_of(result: Result) -> float:
    return result.metrics["step.median_seconds"]


def _told(kept: Iterable[Kept]) -> str:
    return ", ".join(f"{each.name} keeps {each.throughput:.2f} and sends {_megabytes(each)}" for each in kept)


def _with_bytes(kept: Kept) -> str:
    return f"{kept.name} ({_megabytes(kept)})"


def _megabytes(kept: Kept) -> str:
    return f"{figure(kept.sent_bytes, MEGA)} MB"
