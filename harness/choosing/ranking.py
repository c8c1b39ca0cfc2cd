"""Ranking: which candidates a device holds, the fastest first, and why each stands where it does.

The order of those that fit does not depend on the memory, and what fits changes only at their peaks: between two peaks
every amount of memory has the same ranking. A page can therefore hold all of them, and look one up.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.choosing.candidates import Candidate, Place
from harness.choosing.explanation import Fitting, Group, why

State = Literal["fits", "too large", "memory unknown", "other work", "another model", "no result"]


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
    that trains the same model by the same recipe is both faster and smaller."""

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


class Contest:
    """The candidates of one situation, and all of their ranking that does not depend on the memory of a device.
    `one_process` does the same work alone, where it is known."""

    def __init__(self, candidates: Sequence[Candidate], one_process: Candidate | None = None) -> None:
        known = [one for one in candidates if _needs_memory(one)]
        self._by_speed = sorted(known, key=_speed_order)
        self._by_size = sorted(known, key=_size_order)
        order: tuple[State, ...] = ("memory unknown", "other work", "another model", "no result")
        others = [(one, _state(one, 0.0)) for one in sorted(candidates, key=_size_order) if not _needs_memory(one)]
        self._others = sorted(others, key=lambda pair: order.index(pair[1]))
        self._front = {id(one) for one in _front(known)}
        self._group = Group(members=tuple(candidates), one_process=one_process)
        self._said: dict[tuple[object, ...], str] = {}

    def is_on_front(self, candidate: Candidate) -> bool:
        """Whether no other that trains the same model by the same recipe is both faster and smaller."""
        return id(candidate) in self._front

    def ranking(self, memory_bytes: float) -> list[Ranked]:
        """Each candidate, with devices of `memory_bytes`: those that fit, the fastest first and those without a time
        behind them by what they send; then what is too large, the smallest first; then the others."""
        alone = self._group.one_process
        fitting = Fitting(
            group=self._group,
            members=tuple(one for one in self._by_speed if _state(one, memory_bytes) == "fits"),
            one_process_fits=alone is not None and _state(alone, memory_bytes) == "fits",
        )
        too_large: list[tuple[Candidate, State]] = [
            (one, "too large") for one in self._by_size if _state(one, memory_bytes) == "too large"
        ]
        fit: list[tuple[Candidate, State]] = [(one, "fits") for one in fitting.members]
        return [
            Ranked(
                candidate=candidate,
                state=state,
                rank=position if position <= fitting.num_timed else None,
                on_front=self.is_on_front(candidate),
                why=self._why(candidate, state, fitting),
            )
            for position, (candidate, state) in enumerate([*fit, *too_large, *self._others], start=1)
        ]

    def _why(self, candidate: Candidate, state: State, fitting: Fitting) -> str:
        """The words, which are made once for all amounts of memory that ask for the same."""
        key = (id(candidate), state, *(fitting.all_that_matters(candidate) if state == "fits" else ()))
        if key not in self._said:
            self._said[key] = why(candidate, state, fitting)
        return self._said[key]


def rank(candidates: Sequence[Candidate], memory_bytes: float, one_process: Candidate | None = None) -> list[Ranked]:
    """The ranking of one contest with one amount of memory."""
    return Contest(candidates, one_process).ranking(memory_bytes)


def thresholds(candidates: Iterable[Candidate], one_process: Candidate | None = None) -> list[float]:
    """The amounts of memory from which on something else fits; between two of them rankings are the same."""
    matter = [*candidates, *([one_process] if one_process else [])]
    return sorted({one.peak_bytes for one in matter if one.peak_bytes and _needs_memory(one)})


def interval(sorted_thresholds: Sequence[float], memory_bytes: float) -> int:
    """Which ranking of those between the thresholds is that of `memory_bytes`: how many thresholds it reaches."""
    return bisect_right(sorted_thresholds, memory_bytes)


def _state(candidate: Candidate, memory_bytes: float) -> State:
    if candidate.status == "parity failed" or candidate.trains_the_same is False:
        return "another model"
    if candidate.status != "ok":
        return "no result"
    if candidate.other_work is not None:
        return "other work"
    if candidate.peak_bytes is None:
        return "memory unknown"
    return "fits" if candidate.peak_bytes <= memory_bytes else "too large"


def _needs_memory(candidate: Candidate) -> bool:
    """Whether memory alone decides if it fits."""
    return _state(candidate, math.inf) == "fits"


def _size_order(candidate: Candidate) -> tuple[float, float, str]:
    return candidate.peak_bytes or 0.0, -(candidate.units_per_second or 0.0), candidate.label


def _speed_order(candidate: Candidate) -> tuple[object, ...]:
    speed = candidate.units_per_second
    if speed is not None:
        return (0, -speed, candidate.label)
    unknown = candidate.sent_bytes is None
    # What was measured says more than what was foreseen.
    return (1, candidate.basis == "predicted", unknown, candidate.sent_bytes or 0.0, candidate.label)


def _front(known: Iterable[Candidate]) -> list[Candidate]:
    """The Pareto front of memory and speed, of candidates whose memory is known."""
    front: list[Candidate] = []
    best = 0.0
    for candidate in sorted(known, key=_size_order):
        if candidate.units_per_second is not None and candidate.units_per_second > best:
            best = candidate.units_per_second
            front.append(candidate)
    return front
