"""Ranking: which candidates a device holds, the fastest first, and why each stands where it does.

The order of those that fit does not depend on the memory, and what fits changes only at their peaks: between two peaks
every amount of memory has the same ranking. A page can therefore hold all of them, and look one up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.choosing.candidates import Candidate, Place
from harness.choosing.explanation import Group, why

State = Literal["fits", "too large", "memory unknown", "another model", "no result"]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is asked, but for the memory of a device."""

    work: str
    precision: str
    machine: str
    place: Place


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate among the others. `rank` counts from 1 among those that fit and have a time; `on_front`: no other
    that trains the same model is both faster and smaller."""

    candidate: Candidate
    state: State
    rank: int | None
    on_front: bool
    why: str


def situation_of(candidate: Candidate) -> Situation:
    return Situation(
        work=candidate.work, precision=candidate.precision, machine=candidate.machine, place=candidate.place
    )


def situations(candidates: Iterable[Candidate]) -> list[Situation]:
    """Every one that there is a candidate for, the fewest devices first."""
    found = dict.fromkeys(situation_of(candidate) for candidate in candidates)
    return sorted(found, key=_order)


def _order(situation: Situation) -> tuple[object, ...]:
    place = situation.place
    rate = float("inf") if place.link_mbits is None else place.link_mbits
    return (
        situation.work,
        situation.precision,
        situation.machine,
        place.num_devices,
        place.num_nodes,
        -rate,
        place.delay_ms,
    )


def rank(candidates: Sequence[Candidate], memory_bytes: float, one_process: Candidate | None = None) -> list[Ranked]:
    """The candidates of one situation, each with devices of `memory_bytes`: those that fit, the fastest first and those
    without a time behind them by what they send; then what is too large, the smallest first; then the others.
    `one_process` does the same work alone, where it is known."""
    states = [_state(candidate, memory_bytes) for candidate in candidates]
    fitting = sorted(
        (candidate for candidate, state in zip(candidates, states, strict=True) if state == "fits"), key=_speed_order
    )
    group = Group(
        members=tuple(candidates),
        fitting=tuple(fitting),
        one_process=one_process,
        one_process_fits=one_process is not None and _state(one_process, memory_bytes) == "fits",
    )
    front = _front(candidates)
    order: tuple[State, ...] = ("too large", "memory unknown", "another model", "no result")
    rest = [
        (candidate, state)
        for wanted in order
        for candidate, state in sorted(
            zip(candidates, states, strict=True),
            key=lambda pair: (pair[0].peak_bytes or 0.0, -(pair[0].units_per_second or 0.0), pair[0].label),
        )
        if state == wanted
    ]
    timed = [candidate for candidate in fitting if candidate.units_per_second is not None]
    return [
        Ranked(
            candidate=candidate,
            state=state,
            rank=timed.index(candidate) + 1 if state == "fits" and candidate in timed else None,
            on_front=candidate in front,
            why=why(candidate, state, group),
        )
        for candidate, state in [*((candidate, "fits") for candidate in fitting), *rest]
    ]


def thresholds(candidates: Iterable[Candidate], one_process: Candidate | None = None) -> list[float]:
    """The amounts of memory from which on something else fits; between two of them rankings are the same."""
    matter = [*candidates, *([one_process] if one_process else [])]
    return sorted({one.peak_bytes for one in matter if one.peak_bytes and _state(one, 0.0) == "too large"})


def interval(sorted_thresholds: Sequence[float], memory_bytes: float) -> int:
    """Which ranking of those between the thresholds is that of `memory_bytes`: how many thresholds it reaches."""
    return bisect_right(sorted_thresholds, memory_bytes)


def _state(candidate: Candidate, memory_bytes: float) -> State:
    if candidate.status == "parity failed" or candidate.trains_the_same is False:
        return "another model"
    if candidate.status != "ok":
        return "no result"
    if candidate.peak_bytes is None:
        return "memory unknown"
    return "fits" if candidate.peak_bytes <= memory_bytes else "too large"


def _speed_order(candidate: Candidate) -> tuple[object, ...]:
    speed = candidate.units_per_second
    if speed is not None:
        return (0, -speed, candidate.label)
    unknown = candidate.sent_bytes is None
    # What was measured says more than what was foreseen.
    return (1, candidate.basis == "predicted", unknown, candidate.sent_bytes or 0.0, candidate.label)


def _front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The Pareto front of memory and speed."""
    front: list[Candidate] = []
    best = 0.0
    known = [
        (candidate.peak_bytes, candidate.units_per_second, candidate)
        for candidate in candidates
        if _state(candidate, 0.0) == "too large" and candidate.units_per_second is not None
    ]
    for _, speed, candidate in sorted(known, key=lambda item: (item[0], -item[1], item[2].label)):
        if speed > best:
            best = speed
            front.append(candidate)
    return front
