"""Change points: where the level of a series of nightly figures moved, by energy statistics and bisection.

E-divisive (Matteson and James 2014): of all cuts of a segment the one with the largest scaled energy distance between
its two sides is a change point if hardly any permutation of the segment has a cut as good; each side is then looked at
in turn. A cut must also move the level by as much as matters, or it is none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_SIDE = 3  # points: a night that is odd by itself, or two, is no change of level
SIGNIFICANCE = 1e-4
MIN_SHIFT = 0.02  # of the level
MIN_SHIFT_IN_NOISE = 1.5  # robust standard deviations
WINSOR_IN_NOISE = 4.0  # robust standard deviations

_SD_OF_MAD = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_SEED = 20140622  # any: the same series is to give the same answer every time
_FIRST_BATCH, _LARGEST_BATCH = 8, 64  # the distances of more permutations do not fit into a processor's cache

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Statistics = Callable[[Floats, Indices], tuple[Indices, Floats]]


@dataclass(frozen=True, kw_only=True)
class ChangePoint:
    """The series' level moved from its point `index` on: by `shift` (0.05 is 5 % up), from its median in the segment
    before to that in the segment after."""

    index: int
    shift: float


@dataclass(frozen=True, kw_only=True)
class Segments:
    """A series cut at its change points. `starts` begins with 0; `levels` are the segments' medians, in the logarithms
    that the series came in; `noise` is the robust standard deviation around them."""

    starts: tuple[int, ...]
    levels: tuple[float, ...]
    noise: float

    @property
    def least_move(self) -> float:
        """By how much, in logarithms, a level must move for it to matter beside this noise."""
        return max(math.log1p(MIN_SHIFT), MIN_SHIFT_IN_NOISE * self.noise)

    @property
    def change_points(self) -> tuple[ChangePoint, ...]:
        steps = zip(self.starts[1:], self.levels, self.levels[1:], strict=False)
        return tuple(ChangePoint(index=start, shift=math.expm1(after - before)) for start, before, after in steps)


def segments(logarithms: Sequence[float], *, significance: float = SIGNIFICANCE) -> Segments:
    """Cuts a series of logarithms, oldest first, where its level moved. `significance` is the largest p-value of a cut.
    ValueError unless there are values, all finite, and `significance` lies within (0, 1)."""
    values = np.asarray(logarithms, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"change points: expected a series of finite numbers, got {list(logarithms)!r}")
    if not 0 < significance < 1:
        raise ValueError(f"change points: significance must lie between 0 and 1, got {significance!r}")
    clipped = winsorised(values)
    starts = sorted(_starts(clipped, 0, significance, np.random.default_rng(_SEED)))
    # Bisection cuts from the coarse to the fine; a cut that matters little among its final neighbours goes again.
    while True:
        bounds = [*starts, len(values)]
        parts = [values[start:end] for start, end in itertools.pairwise(bounds)]
        levels = [float(np.median(part)) for part in parts]
        residuals = np.concatenate([part - level for part, level in zip(parts, levels, strict=True)])
        noise = _SD_OF_MAD * float(np.median(np.abs(residuals)))
        found = Segments(starts=tuple(starts), levels=tuple(levels), noise=noise)
        moves = np.abs(np.diff(levels))
        if not moves.size or moves.min() > found.least_move:
            return found
        del starts[1 + int(np.argmin(moves))]


def winsorised(values: Floats) -> Floats:
    """`values` with those farther than WINSOR_IN_NOISE robust standard deviations from the median of their
    neighbourhood brought there: odd nights lose their weight, levels keep theirs. As they are where most lie on that
    median, which says nothing of their spread."""
    if len(values) < 2 * MIN_SIDE:
        return values
    padded = np.pad(values, MIN_SIDE, constant_values=np.nan)
    neighbourhoods = np.lib.stride_tricks.sliding_window_view(padded, 2 * MIN_SIDE + 1)  # (points, neighbours)
    centres = np.nanmedian(neighbourhoods, axis=1)
    reach = WINSOR_IN_NOISE * _SD_OF_MAD * np.median(np.abs(values - centres))
    return np.clip(values, centres - reach, centres + reach) if reach > 0 else values


def _starts(values: Floats, offset: int, significance: float, random: np.random.Generator) -> list[int]:
    """Where the segments of `values` begin, counted from `offset`."""
    if len(values) < 2 * MIN_SIDE:
        return [offset]
    # A level that came and went is hidden from the first by what follows; the second costs more.
    for statistics_of in (energy_statistics, energy_statistics_within):
        cuts, statistics = statistics_of(values, np.arange(len(values))[:, np.newaxis])
        if _is_significant(values, float(statistics.max()), statistics_of, significance, random):
            cut = int(cuts[np.argmax(statistics)])
            left = _starts(values[:cut], offset, significance, random)
            return left + _starts(values[cut:], offset + cut, significance, random)
    return [offset]


def energy_statistics(values: Floats, orders: Indices) -> tuple[Indices, Floats]:
    """Every cut, by the points on its left, and the scaled energy distance m n / (m + n) E between its two sides,
    (cuts, orders), with `values` taken in each of `orders`, (points, orders). At least MIN_SIDE points on each side.

    E = 2 mean |x - y| - mean |x - x'| - mean |y - y'|, means within a side over its pairs of different points
    (Matteson and James 2014, equations 2 to 5, alpha = 1, the right side reaching to the end).
    """
    num_points = len(values)
    distances_to_all = np.abs(values[:, np.newaxis] - values).sum(axis=1)
    series = values[orders]  # (points, orders)
    to_the_left = np.zeros_like(series)  # of each point: the sum of its distances from those before it
    differences = np.empty_like(series)
    for point in range(1, num_points):
        before = np.subtract(series[:point], series[point], out=differences[:point])
        np.abs(before, out=before).sum(axis=0, out=to_the_left[point])
    within_left = np.cumsum(to_the_left, axis=0)  # over pairs, each once
    across = np.cumsum(distances_to_all[orders], axis=0) - 2 * within_left
    within_right = within_left[-1] - within_left - across
    cuts = np.arange(MIN_SIDE, num_points - MIN_SIDE + 1)
    last = cuts - 1  # point of the left side
    return cuts, _energy(cuts, num_points - cuts, across[last], within_left[last], within_right[last])


def energy_statistics_within(values: Floats, orders: Indices) -> tuple[Indices, Floats]:
    """The same where the right side may end anywhere: one row for each pair of a cut and an end (the paper's kappa)."""
    num_points, num_orders = orders.shape
    series = values[orders]
    sums = np.zeros((num_points + 1, num_points + 1, num_orders))  # of all distances among the first so many points
    distances = np.abs(series[:, np.newaxis] - series)  # (points, points, orders)
    np.cumsum(np.cumsum(distances, axis=0, out=distances), axis=1, out=sums[1:, 1:])
    diagonal = sums[np.arange(num_points + 1), np.arange(num_points + 1)]  # (points + 1, orders)
    all_cuts, statistics = [], []
    for cut in range(MIN_SIDE, num_points - MIN_SIDE + 1):
        ends = np.arange(cut + MIN_SIDE, num_points + 1)
        cuts = np.full(len(ends), cut)
        across = sums[cut, cut + MIN_SIDE :] - diagonal[cut]
        within_right = (diagonal[cut + MIN_SIDE :] - diagonal[cut]) / 2 - across
        all_cuts.append(cuts)
        statistics.append(_energy(cuts, ends - cuts, across, diagonal[cut] / 2, within_right))
    return np.concatenate(all_cuts), np.concatenate(statistics)


def _energy(left: Indices, right: Indices, across: Floats, within_left: Floats, within_right: Floats) -> Floats:
    """The statistic from the sizes of both sides (cuts,) and the sums of distances over pairs (cuts, orders)."""
    m, n = left[:, np.newaxis], right[:, np.newaxis]
    scale = m * n / (m + n)
    weights = 2 * scale / (m * n), 2 * scale / (m * (m - 1)), 2 * scale / (n * (n - 1))
    return np.asarray(weights[0] * across - weights[1] * within_left - weights[2] * within_right)


def _is_significant(
    values: Floats, statistic: float, statistics_of: Statistics, significance: float, random: np.random.Generator
) -> bool:
    """Whether (1 + permutations at least as good) / (1 + permutations) is at most `significance`: so few permutations
    that not one may be, which makes a series without a change cost next to nothing."""
    remaining = math.ceil(1 / significance) - 1
    as_good = statistic - 1e-9 * abs(statistic)  # the same two sides, summed in another order, are as good
    batch = _FIRST_BATCH
    while remaining > 0:
        size = min(batch, remaining)
        in_order = np.broadcast_to(np.arange(len(values))[:, np.newaxis], (len(values), size))
        _, statistics = statistics_of(values, random.permuted(in_order, axis=0))
        if statistics.max() >= as_good:
            return False
        remaining -= size
        batch = min(2 * batch, _LARGEST_BATCH)
    return True
