"""The straggler: a rank that works much more slowly than the others, which wait for it in every step.

All ranks of a synchronous step take equally long, so that their times do not tell who keeps whom. After each timed
window every rank does a fixed piece of work by itself, in its own time; see `Worker.time_steps`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_MUCH_SLOWER = 0.5  # of the others' speed; neighbours on busy processors differ by less


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """`speed` is the rank's as a fraction of the others'."""

    rank: int
    speed: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is a straggler: it works at {self.speed:.0%} of the others' speed, and all wait for it"
        )


def speeds(fixed_work_seconds: Sequence[Sequence[float]]) -> list[float]:
    """Each rank's speed as a fraction of the median of the others', from seconds for the same work (rounds, ranks).
    Empty where there is nothing to compare."""
    medians = [statistics.median(of_rank) for of_rank in zip(*fixed_work_seconds, strict=True)]
    if len(medians) < 2 or not all(seconds > 0 for seconds in medians):
        return []
    return [statistics.median(medians[:rank] + medians[rank + 1 :]) / seconds for rank, seconds in enumerate(medians)]


def find(fixed_work_seconds: Sequence[Sequence[float]], *, processors_a_rank: float = 1.0) -> Straggler | None:
    """The slowest rank, where it is much slower than the others. Ranks that share processors take turns on them: two on
    one may differ by as much again without either being slow."""
    found = speeds(fixed_work_seconds)
    slowest = min(range(len(found)), key=found.__getitem__, default=None)
    if slowest is None or found[slowest] >= _MUCH_SLOWER * min(1.0, processors_a_rank):
        return None
    return Straggler(rank=slowest, speed=found[slowest])
