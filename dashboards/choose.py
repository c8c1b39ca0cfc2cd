"""Choose: which strategies fit the devices that somebody has, the fastest first, and why.

The ranking is harness.choosing's alone. What fits comes in one order, what is too large in another, whatever the
memory, and words change only at the candidates' peaks: the page holds both orders, and for each candidate from which
peak on what is said of it. The script looks this up, and ranks nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dashboards.blocks import SYMBOLS
from dashboards.data import MIB, Study, place_order
from harness.choosing.candidates import Candidate, Place, one_process
from harness.choosing.ranking import Contest, thresholds

TITLE = "Choose"


def choices(study: Study) -> Mapping[str, Any]:
    """Everything that the form can ask for: `places`, each with its candidates, thresholds and rankings."""
    alone = one_process(study.candidates, study.work, study.precision, study.machine)
    groups: dict[Place, list[Candidate]] = {}
    for candidate in study.candidates:
        groups.setdefault(candidate.place, []).append(candidate)
    places = sorted(groups, key=place_order)
    return {
        "unit": next((one.unit for one in study.candidates if one.units_per_second), "tokens"),
        "memory_mib": _enough_mib(study),
        "places": [_place(place, groups[place], alone) for place in places],
    }


def _place(place: Place, members: list[Candidate], alone: Candidate | None) -> Mapping[str, Any]:
    limits = thresholds(members, alone)
    contest = Contest(members, alone)
    numbers = {id(one): number for number, one in enumerate(members)}
    reasons: dict[str, int] = {}
    said: list[list[tuple[int, int]]] = [[] for _ in members]
    nothing_fits = contest.ranking(0.0)
    all_fit = contest.ranking(math.inf)
    for interval, memory in enumerate((0.0, *limits)):
        for ranked in contest.ranking(memory):
            of_one = said[numbers[id(ranked.candidate)]]
            reason = reasons.setdefault(ranked.why, len(reasons))
            if not of_one or of_one[-1][1] != reason:
                of_one.append((interval, reason))
    states = {id(ranked.candidate): ranked.state for ranked in nothing_fits}
    return {
        "devices": place.num_devices,
        "nodes": place.num_nodes,
        "link": place.link,
        "candidates": [
            {**_shown(one, contest.is_on_front(one)), "state": states[id(one)], "whys": whys}
            for one, whys in zip(members, said, strict=True)
        ],
        "thresholds": limits,
        "bySize": [numbers[id(ranked.candidate)] for ranked in nothing_fits],
        "bySpeed": [numbers[id(ranked.candidate)] for ranked in all_fit],
        "reasons": list(reasons),
    }


def _shown(one: Candidate, on_front: bool) -> Mapping[str, Any]:
    return {
        "label": one.label,
        "layout": one.layout,
        "strategy": one.strategy,
        "colour": f"@{one.strategy}",
        "mark": SYMBOLS.get(one.family, "circle"),
        "basis": one.basis,
        "memoryBasis": one.memory_basis,
        "speed": one.units_per_second,
        "peak": one.peak_bytes,
        "exposed": one.exposed_ratio,
        "sent": one.sent_bytes,
        "bubble": one.bubble_ratio,
        "same": one.trains_the_same,
        "otherWork": one.other_work,
        "status": one.status,
        "reason": one.reason,
        "front": on_front,
    }


def _enough_mib(study: Study) -> float:
    """The form's first answer: memory that holds everything."""
    peaks = [one.peak_bytes for one in study.candidates if one.peak_bytes is not None]
    mib = max(peaks, default=1024 * MIB) / MIB
    step = 10.0 ** (len(str(int(mib))) - 1)
    return step * (int(mib / step) + 1)
