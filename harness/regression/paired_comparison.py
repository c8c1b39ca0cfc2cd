"""Paired comparison: two revisions timed in turns, ABBA, and what their times say of the difference.

Two tests share the doubt: Wilcoxon's on the pairs, which sees through what drifts, and Mann and Whitney's on the two
samples, which a few odd pairs do not sway; the better p-value counts twice (Bonferroni). An effect must be significant
and large enough. Over a suite the p-values are adjusted (Benjamini and Hochberg 1995).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FIRST_PAIRS, MOST_PAIRS = 10, 20
SIGNIFICANCE = 0.005
MIN_SHIFT = 0.02

PairedVerdict = Literal["regressed", "improved", "ok", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """B against A. `shift` is relative (0.05: B takes 5 % longer), with the `interval` in which it lies with a
    confidence of 1 - SIGNIFICANCE; `p_value` is two-sided and not yet adjusted."""

    num_pairs: int
    shift: float
    interval: tuple[float, float]
    p_value: float


def abba(num_pairs: int) -> str:
    """The order of `num_pairs` pairs, ABBAABBA...: a machine that drifts evenly favours neither. ValueError for an odd
    number, which would leave it out of balance."""
    if num_pairs < 2 or num_pairs % 2:
        raise ValueError(f"ABBA: expected an even number of pairs, at least 2, got {num_pairs}")
    return "ABBA" * (num_pairs // 2)


def compare(a_seconds: Sequence[float], b_seconds: Sequence[float]) -> Comparison:
    """Compares paired times, in seconds. ValueError unless both have FIRST_PAIRS or more, as many, all above 0."""
    if len(a_seconds) != len(b_seconds) or len(a_seconds) < FIRST_PAIRS:
        raise ValueError(
            f"comparison: expected at least {FIRST_PAIRS} pairs, got {len(a_seconds)} and {len(b_seconds)} times"
        )
    if not all(0 < seconds < math.inf for seconds in (*a_seconds, *b_seconds)):
        raise ValueError(f"comparison: times must be finite and above 0, got {[*a_seconds, *b_seconds]}")
    a, b = np.log(a_seconds), np.log(b_seconds)
    averages = walsh_averages(b - a)
    low, high = _interval(averages, len(a))
    p_value = 1.0
    if np.any(b != a):
        p_wilcoxon = stats.wilcoxon(b - a).pvalue
        has_ties = len(set(a) | set(b)) < 2 * len(a)
        p_mann_whitney = stats.mannwhitneyu(a, b, method="asymptotic" if has_ties else "exact").pvalue
        p_value = min(1.0, 2 * float(min(p_wilcoxon, p_mann_whitney)))
    return Comparison(
        num_pairs=len(a),
        shift=math.expm1(float(np.median(averages))),  # Hodges and Lehmann's estimate
        interval=(math.expm1(low), math.expm1(high)),
        p_value=p_value,
    )


def walsh_averages(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of every pair of differences, each with itself too, sorted: n (n + 1) / 2 of them."""
    first, second = np.triu_indices(len(differences))
    return np.sort((differences[first] + differences[second]) / 2)


def _interval(averages: NDArray[np.float64], num_pairs: int) -> tuple[float, float]:
    """What Wilcoxon's signed-rank test does not reject: as many averages go at either end as its exact distribution
    gives SIGNIFICANCE / 2 to."""
    counts = np.ones(1)  # of sign patterns, by their rank sum
    for rank in range(1, num_pairs + 1):
        counts = np.convolve(counts, [1.0, *[0.0] * (rank - 1), 1.0])
    below = np.cumsum(counts) / 2.0**num_pairs
    outside = int(np.searchsorted(below, SIGNIFICANCE / 2, side="right"))
    # Rank sums up to `outside` - 1 are rejected: with `outside` averages below it a shift is not.
    return float(averages[outside - 1]), float(averages[-outside])


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's p-values: those at most q have a false discovery rate of at most q."""
    if not p_values:
        return []
    return [float(value) for value in stats.false_discovery_control(p_values, method="bh")]


def verdicts(comparisons: Sequence[Comparison]) -> list[PairedVerdict]:
    """Verdicts on the comparisons of a suite. `undecided` asks for more pairs: the interval still holds a shift that
    matters, and the test has not told it from none. With MOST_PAIRS that counts as ok."""
    p_values = adjusted([comparison.p_value for comparison in comparisons])
    return [_verdict(comparison, p) for comparison, p in zip(comparisons, p_values, strict=True)]


def _verdict(comparison: Comparison, p_value: float) -> PairedVerdict:
    if p_value < SIGNIFICANCE:
        return "ok" if abs(comparison.shift) <= MIN_SHIFT else "regressed" if comparison.shift > 0 else "improved"
    low, high = comparison.interval
    may_matter = low < -MIN_SHIFT or high > MIN_SHIFT
    return "undecided" if may_matter and comparison.num_pairs < MOST_PAIRS else "ok"
