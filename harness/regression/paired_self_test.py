"""What two commits in turns can tell, from simulated times: how often a case that has not changed is called regressed,
and how often one that has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.regression.paired_comparison import FIRST_PAIRS, MOST_PAIRS, compare, verdicts

NOISE = 0.02  # standard deviation of a run's logarithm
SHIFTS = (0.0, 0.02, 0.05, 0.15)
# The test errs in 0.5 % of cases on either side, has two looks, and asks for 2 % besides: far less than this.
MOST_FALSE = 0.01
PROVEN_SHIFT, LEAST_FOUND = 0.05, 0.95


@dataclass(frozen=True, kw_only=True)
class PairedPower:
    """Of comparisons in which B takes longer by `shift`, the parts called regressed, and timed in MOST_PAIRS pairs
    since the first FIRST_PAIRS did not decide."""

    shift: float
    num_comparisons: int
    regressed: float
    extended: float


def paired_powers(*, num_comparisons: int, random: np.random.Generator) -> tuple[PairedPower, ...]:
    return tuple(_power(shift, num_comparisons, random) for shift in SHIFTS)


def paired_failures(powers: Sequence[PairedPower]) -> list[str]:
    """What sound pairs would not say, in words."""
    found = []
    for power in powers:
        told = f"pairs: {power.shift:.0%} slower was called regressed in {power.regressed:.1%}"
        if power.shift == 0 and power.regressed > MOST_FALSE:
            found.append(f"{told}, expected at most {MOST_FALSE:.0%}")
        if power.shift >= PROVEN_SHIFT and power.regressed < LEAST_FOUND:
            found.append(f"{told}, expected at least {LEAST_FOUND:.0%}")
    return found


def _power(shift: float, num_comparisons: int, random: np.random.Generator) -> PairedPower:
    outcomes = [_is_regressed(shift, random) for _ in range(num_comparisons)]
    return PairedPower(
        shift=shift,
        num_comparisons=num_comparisons,
        regressed=sum(regressed for regressed, _ in outcomes) / num_comparisons,
        extended=sum(num_pairs > FIRST_PAIRS for _, num_pairs in outcomes) / num_comparisons,
    )


def _is_regressed(shift: float, random: np.random.Generator) -> tuple[bool, int]:
    """By as many pairs as it takes."""
    a, b = (np.exp(level + random.normal(0.0, NOISE, MOST_PAIRS)).tolist() for level in (0.0, math.log1p(shift)))
    for num_pairs in (FIRST_PAIRS, MOST_PAIRS):
        (verdict,) = verdicts([compare(a[:num_pairs], b[:num_pairs])])
        if verdict != "undecided":
            break
    return verdict == "regressed", num_pairs
