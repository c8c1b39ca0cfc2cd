"""The ratio table of a suite: ours against the fastest peer and against the compute-only floor, from steps that were
timed in one run; in turns where the suite is interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from harness.measure.timing import slowest_rank
from harness.result import HARMLESS, Result


def ratio_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row for each subject and peer of each strategy, among cases of the same work. One that does not train the
    same model has a row, with `parity` failed, and so has one whose options depart from the recipe, in `other_work`;
    neither is anybody's best peer. `parity` of one that was not held against the reference is "not checked";
    `best_peer_parity` is the best peer's.

    `ratio` is its median step over that of the fastest peer (a peer's own row shows how far it is behind that one);
    `floor_ratio` is over the fastest floor's; `overhead_ratio` is (its median - floor) / (fastest peer's - floor), the
    part of the cost that is not computing. `spread` is the distance between the quartiles of the rounds' own ratios;
    None where the cases did not take turns (`in_turns`): a round of one then says nothing about a round of another.
    """
    comparisons: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        comparisons.setdefault(result.case.side_by_side, []).append(result)
    rows = []
    for members in comparisons.values():
        timed = [m for m in members if m.samples.get("step_seconds") and m.status in {*HARMLESS, "parity failed"}]
        floor = min((m for m in timed if m.case.role == "floor"), key=_median, default=None)
        in_turns = took_turns(timed)
        for strategy in dict.fromkeys(m.strategy for m in timed if m.case.role == "subject"):
            peers = [m for m in timed if m.stands_beside(strategy) and m.case.role == "peer"]
            if not (equals := [m for m in peers if m.is_a_measure]):
                continue
            best = min(equals, key=_median)
            ours = [m for m in timed if m.strategy == strategy and m.case.role == "subject"]
            rows += [_row(member, best, floor, strategy, in_turns=in_turns) for member in (*ours, *peers)]
    return rows


def took_turns(results: Sequence[Result]) -> bool:
    """Whether their timed windows took turns: an interleaved suite begins with all cases of a comparison at once, any
    other with the next one when the one before is over."""
    by_start = sorted(results, key=lambda result: result.started)
    return all(later.started <= one.started + one.duration_seconds for one, later in pairwise(by_start))


def _row(result: Result, best: Result, floor: Result | None, strategy: str, *, in_turns: bool) -> dict[str, Any]:
    case = result.case
    own, peer = _median(result), _median(best)
    floor_median = None if floor is None else _median(floor)
    by_round = [a / b for a, b in zip(_round_medians(result), _round_medians(best), strict=False)]
    return {
        "strategy": strategy,
        "comparison": case.comparison,
        "workload": case.workload,
        "layout": str(case.layout),
        "topology": str(case.placed),
        "precision": case.precision,
        "world_size": case.world_size,
        "implementation": case.label,
        "role": case.role,
        "best_peer": best.case.label,
        "best_peer_parity": best.parity_verdict,
        "median_seconds": own,
        "best_peer_seconds": peer,
        "floor_seconds": floor_median,
        "ratio": own / peer,
        "floor_ratio": None if floor_median is None else own / floor_median,
        "overhead_ratio": _overhead_ratio(own, peer, floor_median),
        "parity": result.parity_verdict,
        "other_work": result.other_work,
        "in_turns": in_turns,
        "rounds": len(by_round),
        "spread": _quartile_distance(by_round) if in_turns else None,
    }


def _overhead_ratio(own: float, peer: float, floor: float | None) -> float | None:
    """None where the peer is not above the floor: then there is no overhead to share out."""
    return None if floor is None or peer <= floor else (own - floor) / (peer - floor)


def _median(result: Result) -> float:
    return statistics.median(slowest_rank(result.samples["step_seconds"]))


def _round_medians(result: Result) -> list[float]:
    seconds, size = slowest_rank(result.samples["step_seconds"]), int(result.samples["steps_per_round"])
    return [statistics.median(seconds[start : start + size]) for start in range(0, len(seconds), size)]


def _quartile_distance(values: Sequence[float]) -> float | None:
    if len(values) < 4:
        return None
    lower, _, upper = statistics.quantiles(values, n=4)
    return upper - lower
