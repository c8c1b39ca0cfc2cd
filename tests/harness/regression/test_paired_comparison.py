"""Paired comparisons: figures worked out by hand, an A/A that stays quiet, slowdowns that are found."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.regression.paired_comparison import (
    FIRST_PAIRS,
    MOST_PAIRS,
    Comparison,
    abba,
    adjusted,
    compare,
    verdicts,
    walsh_averages,
)


def test_the_order_is_abba() -> None:
    assert abba(4) == "ABBAABBA"
    assert (abba(10).count("A"), abba(10).count("B")) == (10, 10)
    with pytest.raises(ValueError, match="even number of pairs, at least 2, got 3"):
        abba(3)


def test_walsh_averages_are_the_means_of_all_pairs() -> None:
    assert walsh_averages(np.array([1.0, 2.0, 6.0])).tolist() == [1.0, 1.5, 2.0, 3.5, 4.0, 6.0]


def test_ten_pairs_all_slower_are_significant_to_the_last_sign() -> None:
    a = [1.0 + 0.001 * index for index in range(10)]
    b = [seconds * (1.1 + 0.001 * index) for index, seconds in enumerate(a)]
    found = compare(a, b)
    # Both tests see a complete separation: 2 / 2^10 by signs, 2 / C(20, 10) by ranks; the better one, twice.
    assert found.p_value == pytest.approx(2 * 2 / math.comb(20, 10), rel=1e-9)
    assert found.shift == pytest.approx(0.1045, abs=0.0005)
    # Of 2^10 sign patterns one has rank sum 0, one 1, one 2: two of them are at most 0.0025 of all, three are more.
    # So a shift with one average below it is rejected, one with two is not: the interval begins at the second of them.
    averages = walsh_averages(np.log(b) - np.log(a))
    assert found.interval == pytest.approx((math.expm1(averages[1]), math.expm1(averages[-2])))


def test_the_interval_misses_the_truth_as_seldom_as_it_says() -> None:
    """Over all 2^10 signs of differences around a shift of 0, which are equally likely: 4 of 1024 are at most 0.005, 6
    would be more."""
    sizes = 0.01 * 1.5 ** np.arange(10)
    misses = 0
    for pattern in range(2**10):
        signs = np.array([1 if pattern >> bit & 1 else -1 for bit in range(10)])
        low, high = compare([1.0] * 10, np.exp(signs * sizes).tolist()).interval
        misses += not low <= 0 <= high
    assert misses == 4


def test_drift_that_hides_the_samples_does_not_hide_the_pairs() -> None:
    drift = np.linspace(1.0, 3.0, 10)
    found = compare(drift.tolist(), (1.05 * drift).tolist())
    assert found.p_value == pytest.approx(2 * 2 / 2**10)
    assert verdicts([found]) == ["regressed"]


def test_equal_times_are_equal() -> None:
    found = compare([1.0] * 10, [1.0] * 10)
    assert (found.shift, found.p_value) == (0.0, 1.0)
    assert verdicts([found]) == ["ok"]


def test_p_values_are_adjusted_as_benjamini_and_hochberg_do() -> None:
    # p m / rank, then the smallest of those from there on.
    assert adjusted([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.04 * 4 / 3, 0.04 * 4 / 3, 0.5])
    assert adjusted([]) == []


def comparison(shift: float, p_value: float, num_pairs: int = FIRST_PAIRS, half_width: float = 0.01) -> Comparison:
    return Comparison(
        num_pairs=num_pairs, shift=shift, interval=(shift - half_width, shift + half_width), p_value=p_value
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (comparison(0.03, 0.004), "regressed"),
        (comparison(-0.03, 0.004), "improved"),
        (comparison(0.015, 0.0001), "ok"),  # as sure as can be, and too small to matter
        (comparison(0.015, 0.1), "undecided"),  # may be 2.5 %
        (comparison(0.0, 0.9), "ok"),  # at most 1 %
        (comparison(0.0, 0.9, half_width=0.03), "undecided"),
        (comparison(0.03, 0.01, MOST_PAIRS), "ok"),  # no more pairs, no proof
    ],
)
def test_verdicts(found: Comparison, expected: str) -> None:
    assert verdicts([found]) == [expected]


def test_one_p_value_among_many_weighs_less() -> None:
    assert verdicts([comparison(0.05, 0.004)]) == ["regressed"]
    many = [comparison(0.05, 0.004), *(comparison(0.0, 0.9) for _ in range(9))]
    assert verdicts(many)[0] == "undecided"


def judged(random: np.random.Generator, shift: float) -> str:
    a, b = (np.exp(random.normal(0.0, 0.02, MOST_PAIRS)) for _ in range(2))
    b = b * (1 + shift)
    (verdict,) = verdicts([compare(a[:FIRST_PAIRS].tolist(), b[:FIRST_PAIRS].tolist())])
    return verdicts([compare(a.tolist(), b.tolist())])[0] if verdict == "undecided" else verdict


def test_the_same_revision_twice_is_quiet_and_a_slower_one_is_found() -> None:
    random = np.random.default_rng(0)
    assert [judged(random, 0.0) for _ in range(60)].count("ok") >= 58
    assert [judged(random, 0.05) for _ in range(20)].count("regressed") >= 19
    assert [judged(random, -0.05) for _ in range(20)].count("improved") >= 19


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="at least 10 pairs, got 9 and 9 times"):
        compare([1.0] * 9, [1.0] * 9)
    with pytest.raises(ValueError, match="finite and above 0"):
        compare([0.0] * 10, [1.0] * 10)
