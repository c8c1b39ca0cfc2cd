"""Change points: the statistic by its definition, steps where they are, and silence where there are none."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from harness.regression import change_points
from harness.regression.change_points import energy_statistics, energy_statistics_within, segments, winsorised


def by_definition(values: list[float], cut: int) -> float:
    left, right = values[:cut], values[cut:]
    m, n = len(left), len(right)
    across = sum(abs(x - y) for x in left for y in right) / (m * n)
    within = [sum(abs(x - y) for x, y in itertools.combinations(side, 2)) for side in (left, right)]
    pairs = [m * (m - 1) / 2, n * (n - 1) / 2]
    return m * n / (m + n) * (2 * across - within[0] / pairs[0] - within[1] / pairs[1])


def test_the_statistic_is_the_energy_distance_of_the_two_sides() -> None:
    values = np.random.default_rng(0).normal(size=9)
    orders = np.stack([np.arange(9), np.random.default_rng(1).permutation(9)], axis=1)
    cuts, found = energy_statistics(values, orders)
    assert cuts.tolist() == [3, 4, 5, 6]
    cuts_within, found_within = energy_statistics_within(values, orders)
    pairs = [(cut, end) for cut in range(3, 7) for end in range(cut + 3, 10)]
    assert cuts_within.tolist() == [cut for cut, _ in pairs]
    for column in range(2):
        series = values[orders[:, column]].tolist()
        expected = [by_definition(series, cut) for cut in (3, 4, 5, 6)]
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-12)
        expected = [by_definition(series[:end], cut) for cut, end in pairs]
        np.testing.assert_allclose(found_within[:, column], expected, rtol=1e-9, atol=1e-12)


def test_a_step_is_found_where_it_is_and_as_large_as_it_is() -> None:
    nights = np.random.default_rng(2).normal(0.0, 0.005, 60)
    nights[40:] += math.log(1.05)
    found = segments(nights.tolist())
    (point,) = found.change_points
    assert point.index == 40
    assert point.shift == pytest.approx(0.05, abs=0.004)
    assert found.noise == pytest.approx(0.005, rel=0.4)


def test_two_steps_are_two_change_points() -> None:
    nights = np.random.default_rng(3).normal(0.0, 0.005, 75)
    nights[25:] += math.log(1.1)
    nights[50:] -= math.log(1.2)
    assert [point.index for point in segments(nights.tolist()).change_points] == [25, 50]
    shifts = [point.shift for point in segments(nights.tolist()).change_points]
    assert shifts == pytest.approx([0.1, 1 / 1.2 - 1], abs=0.005)


def test_nothing_is_found_where_nothing_changed() -> None:
    random = np.random.default_rng(4)
    assert [series for series in range(20) if len(segments(random.normal(0, 0.02, 90).tolist()).starts) > 1] == []


def test_the_level_must_move_by_as_much_as_matters() -> None:
    quiet = np.random.default_rng(5).normal(0.0, 0.001, 60)
    step = np.where(np.arange(60) < 30, 0.0, 1.0)
    assert segments((quiet + math.log(1.015) * step).tolist()).starts == (0,), "1.5 %, though it cannot be missed"
    assert segments((quiet + math.log(1.03) * step).tolist()).starts == (0, 30)
    noisy = 50 * quiet  # 5 % by night: a level that moves by one standard deviation does not matter
    assert segments((noisy + 0.05 * step).tolist()).starts == (0,)


def test_the_last_two_nights_are_no_level() -> None:
    nights = np.random.default_rng(6).normal(0.0, 0.01, 60)
    nights[58:] += 0.5
    assert segments(nights.tolist()).starts == (0,)


def test_a_significance_that_is_never_reached_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that any cut reaches finds change where there is none: it is the permutations that decide."""
    nights = np.random.default_rng(7).normal(0.0, 0.02, 60)
    monkeypatch.setattr(change_points, "MIN_SHIFT_IN_NOISE", 0.0)
    monkeypatch.setattr(change_points, "MIN_SHIFT", 0.0)
    assert segments(nights.tolist()).starts == (0,)
    assert len(segments(nights.tolist(), significance=0.99).starts) > 1


def test_an_odd_night_is_brought_near_and_levels_stay() -> None:
    values = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 100.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    # Medians of up to seven neighbours are 0.5 or 1 and 0; the median distance from them is 0.5.
    found = winsorised(values)
    assert found[5] == pytest.approx(1.0 + 4 * 1.4826 * 0.5)
    assert np.delete(found, 5).tolist() == np.delete(values, 5).tolist()
    levels = np.array([0.0, 0.1] * 10 + [5.0, 5.1] * 2)
    assert winsorised(levels).tolist() == levels.tolist()
    assert winsorised(np.array([1.0] * 9 + [5.0])).tolist() == [1.0] * 9 + [5.0], "no spread, no measure of oddity"


def test_a_level_that_came_and_went_is_found_from_its_edges() -> None:
    nights = np.random.default_rng(9).normal(0.0, 0.003, 40)
    nights[15:27] -= 0.1
    assert segments(nights.tolist()).starts == (0, 15, 27)


def test_the_same_series_gives_the_same_answer() -> None:
    nights = np.random.default_rng(8).standard_t(2, 80).tolist()
    assert segments(nights) == segments(nights)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"finite numbers, got .*nan"):
        segments([0.0, math.nan])
    with pytest.raises(ValueError, match="finite numbers, got"):
        segments([])
    with pytest.raises(ValueError, match="between 0 and 1, got 0"):
        segments([0.0], significance=0)
