"""Our change points beside those of Apache Otava 0.8.0, on the same series: where both look for the same, they find the
same; and where they part, it is for what ours adds.

Otava tells a change by Student's t-test at p < 0.001 in windows of 50 points (Fleming et al. 2023, "Hunter"), ours by
permutations at p <= 1e-4 over the whole series, after winsorising, for levels of three nights and more that move by
what matters. Both begin with the same statistic (Matteson and James 2014).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.regression.change_points import energy_statistics_within, segments

PYTHON = os.environ.get("MESHMARK_OTAVA_PYTHON", "")
NIGHTS, NUM_SERIES = 90, 8
NEAR = 2  # nights

pytestmark = [pytest.mark.otava, pytest.mark.skipif(not PYTHON, reason="`nox -s change_points` brings Apache Otava")]


def series(noise: float, *steps: tuple[int, float]) -> list[list[float]]:
    """NUM_SERIES series of logarithms: levels that move by a factor from some night on."""
    made = []
    for seed in range(NUM_SERIES):
        nights = np.random.default_rng(seed).normal(0.0, noise, NIGHTS)
        for night, by in steps:
            nights[night:] += math.log1p(by)
        made.append(nights.tolist())
    return made


def ours(logarithms: list[list[float]]) -> list[list[int]]:
    return [[point.index for point in segments(nights).change_points] for nights in logarithms]


def otavas(logarithms: list[list[float]], **options: Any) -> list[list[int]]:
    """Of the values themselves, as it is used."""
    request = {"series": np.exp(logarithms).tolist(), "options": options}
    answer = subprocess.run(
        [PYTHON, Path(__file__).with_name("otava_change_points.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return list(json.loads(answer.stdout))


def are_near(found: list[int], others: list[int]) -> bool:
    return len(found) == len(others) and all(abs(a - b) <= NEAR for a, b in zip(found, others, strict=True))


@pytest.mark.parametrize(
    ("noise", "steps"),
    [
        (0.02, [(45, 0.05)]),
        (0.02, [(60, 0.10)]),
        (0.01, [(80, 0.05)]),
        (0.01, [(30, 0.08), (60, -0.074)]),
        (0.01, [(30, 0.04), (60, 0.06)]),
    ],
    ids=["5 %", "10 %", "late", "up and down", "two up"],
)
def test_the_same_series_have_the_same_change_points(noise: float, steps: list[tuple[int, float]]) -> None:
    """At our significance and our least shift. (At its own, 0.001, it finds one more in some of these series.)"""
    logarithms = series(noise, *steps)
    found, others = ours(logarithms), otavas(logarithms, max_pvalue=1e-4, min_magnitude=0.02)
    assert [are_near(points, [night for night, _ in steps]) for points in found] == [True] * NUM_SERIES, found
    assert [are_near(points, more) for points, more in zip(found, others, strict=True)] == [True] * NUM_SERIES, others


def test_where_nothing_changed_ours_is_silent_and_otava_no_more_than_that() -> None:
    logarithms = series(0.02)
    found, others = ours(logarithms), otavas(logarithms)
    assert found == [[]] * NUM_SERIES
    assert sum(map(len, others)) >= sum(map(len, found))


def test_what_does_not_matter_is_otavas_to_find() -> None:
    """1.5 % at 0.1 % noise: significant, and less than what matters; told so, Otava leaves it out as well."""
    logarithms = series(0.001, (45, 0.015))
    assert ours(logarithms) == [[]] * NUM_SERIES
    assert all(45 in points for points in otavas(logarithms))
    assert otavas(logarithms, max_pvalue=1e-4, min_magnitude=0.02) == [[]] * NUM_SERIES


def test_two_nights_are_a_level_for_otava_and_none_for_ours() -> None:
    logarithms = series(0.01, (NIGHTS - 2, 0.3))
    assert ours(logarithms) == [[]] * NUM_SERIES
    assert otavas(logarithms, max_pvalue=1e-4, min_magnitude=0.02) == [[NIGHTS - 2]] * NUM_SERIES


def test_the_best_cut_is_the_same() -> None:
    """The statistic behind both, of one cut and one end: Otava's own first candidate."""
    logarithms = series(0.02, (45, 0.05))
    script = """
import json, sys
import numpy as np
from otava.change_point_divisive.calculator import PairDistanceCalculator

for values in json.load(sys.stdin):
    best = PairDistanceCalculator(np.array(values)).get_candidate_change_point(slice(0, len(values)))
    print(best.index, best.qhat)
"""
    answer = subprocess.run(
        [PYTHON, "-c", script], input=json.dumps(logarithms), capture_output=True, text=True, check=True, timeout=60
    )
    for values, line in zip(logarithms, answer.stdout.splitlines(), strict=True):
        cuts, statistics = energy_statistics_within(np.asarray(values), np.arange(NIGHTS)[:, np.newaxis])
        index, value = line.split()
        assert int(index) == cuts[int(np.argmax(statistics))]
        assert float(value) == pytest.approx(float(statistics.max()), rel=1e-9)
