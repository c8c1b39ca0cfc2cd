"""Choose: which strategies fit the devices that somebody has, the fastest first, and why.

The ranking is harness.choosing's alone. For a place it changes only at the candidates' peaks, so the page holds it for
every interval between them and looks up the one that the asked memory lies in: the script ranks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboards.blocks import SYMBOLS
from dashboards.data import MIB, Study, place_order
from harness.choosing.candidates import Candidate, Place, one_process
from harness.choosing.ranking import rank, thresholds

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
    reasons: dict[str, int] = {}
    rankings = []
    front: set[int] = set()
    for memory in (0.0, *limits):
        ranked = rank(members, memory, alone)
        front = {members.index(one.candidate) for one in ranked if one.on_front}
        rankings.append(
            [
                [members.index(one.candidate), one.state, one.rank, reasons.setdefault(one.why, len(reasons))]
                for one in ranked
            ]
        )
    return {
        "devices": place.num_devices,
        "nodes": place.num_nodes,
        "link": place.link,
        "candidates": [_shown(one, index in front) for index, one in enumerate(members)],
        "thresholds": limits,
        "rankings": rankings,
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
