"""The last night against those before: what counts as slower, since when, and what was accepted."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from harness.regression.time_history import MIN_NIGHTS, TimeChange, last_night


def nights(*levels: tuple[int, float], noise: float = 0.003, seed: int = 0) -> list[float]:
    """So many nights at each relative level."""
    clean = np.concatenate([np.full(count, math.log(level)) for count, level in levels])
    return (clean + np.random.default_rng(seed).normal(0.0, noise, len(clean))).tolist()


def test_too_few_nights_say_nothing() -> None:
    assert last_night(nights((15, 1.0), (4, 2.0))).verdict == "insufficient data"
    assert last_night(nights((10, 1.0), (MIN_NIGHTS - 10, 2.0))).verdict == "regressed"


def test_a_slowdown_is_a_regression_since_its_first_night() -> None:
    change = last_night(nights((40, 1.0), (10, 1.05)))
    assert (change.verdict, change.since) == ("regressed", 40)
    assert change.shift == pytest.approx(0.05, abs=0.005)


def test_nothing_new_is_ok() -> None:
    assert last_night(nights((60, 1.0))).verdict == "ok"


def test_faster_is_an_improvement_and_still_is_after_weeks() -> None:
    for count in (10, 30):
        change = last_night(nights((40, 1.0), (count, 0.9)))
        assert (change.verdict, change.since) == ("improved", 40)
        assert change.shift == pytest.approx(-0.1, abs=0.005)


def test_half_of_a_regression_taken_back_is_half_a_regression() -> None:
    change = last_night(nights((15, 1.0), (10, 1.1), (10, 1.05)))
    assert (change.verdict, change.since) == ("regressed", 15)
    assert change.shift == pytest.approx(0.05, abs=0.005)


def test_all_of_it_taken_back_is_none() -> None:
    assert last_night(nights((15, 1.0), (10, 1.1), (10, 1.0))).verdict == "improved"


@pytest.mark.parametrize(("before", "slow"), [(20, 8), (40, 8), (40, 6), (40, 12)])
def test_four_nights_at_the_old_level_end_a_regression(before: int, slow: int) -> None:
    """The cut at its end becomes significant many nights later only."""
    assert last_night(nights((before, 1.0), (slow, 1.2))).verdict == "regressed"
    assert last_night(nights((before, 1.0), (slow, 1.2), (2, 1.0))).verdict == "regressed"
    for since in (4, 6, 8, 12):
        assert last_night(nights((before, 1.0), (slow, 1.2), (since, 1.0))).verdict in ("ok", "improved")


def near(*moved: int) -> Callable[[int], bool]:
    """Whether something else than the code changed that night, or one night away."""
    return lambda night: any(abs(night - other) <= 1 for other in moved)


def test_what_came_with_other_software_is_an_environment_shift() -> None:
    change = last_night(nights((30, 1.0), (30, 1.1)), excused=near(30))
    assert (change.verdict, change.since) == ("environment shift", 30)
    assert change.shift == pytest.approx(0.1, abs=0.005)
    (step,) = change.steps
    assert (step.night, step.is_excused) == (30, True)


@pytest.mark.parametrize("code_first", [False, True])
def test_no_regression_hides_behind_an_environment_shift(code_first: bool) -> None:
    """The level moves at night 30, with another torch, and at night 60, without; or the other way round."""
    if code_first:
        change, since = last_night(nights((30, 1.0), (30, 1.08), (20, 1.08 * 1.1)), excused=near(60)), 30
    else:
        change, since = last_night(nights((30, 1.0), (30, 1.1), (20, 1.1 * 1.08)), excused=near(30)), 60
    assert (change.verdict, change.since) == ("regressed", since)
    assert change.shift == pytest.approx(0.08, abs=0.005), "what torch costs is not the code's"
    own = [step.shift for step in change.steps if not step.is_excused]
    assert own == pytest.approx([0.08], abs=0.005)


def test_an_environment_shift_that_the_code_had_made_up_for_is_told() -> None:
    """All steps since the old level was left again are the code's, and too small together."""
    change = last_night(nights((20, 1.0), (15, 1.1), (15, 1.015), (15, 1.06), (15, 1.03)), excused=near(20))
    assert change.verdict == "environment shift"
    assert change.since == 50
    assert [step.night for step in change.steps if step.is_excused] == [20]


def test_steps_of_the_code_add_up_over_an_environment_shift() -> None:
    creep = nights((25, 1.0), (20, 1.03), (20, 1.03 * 1.1), (20, 1.03 * 1.1 * 1.03))
    change = last_night(creep, excused=near(45))
    assert (change.verdict, change.since) == ("regressed", 25)
    assert change.shift == pytest.approx(1.03**2 - 1, abs=0.005)
    assert [step.is_excused for step in change.steps] == [False, True, False]


def test_a_regression_that_is_mended_leaves_the_environment_shift() -> None:
    mended = nights((25, 1.0), (20, 1.1), (15, 1.1 * 1.08), (20, 1.1))
    assert last_night(mended, excused=near(25)).verdict == "environment shift"
    assert last_night(mended[:64], excused=near(25)).verdict == "environment shift", "four nights are enough"


@pytest.mark.parametrize("slow", [1, 3])
def test_no_suspicion_hides_behind_an_environment_shift(slow: int) -> None:
    change = last_night(nights((30, 1.0), (20, 1.1), (slow, 1.1 * 1.08)), excused=near(30))
    assert (change.verdict, change.since) == ("suspect", 50)
    assert change.shift == pytest.approx(0.08, abs=0.005)


def test_an_improvement_lost_is_a_regression() -> None:
    assert last_night(nights((15, 1.0), (10, 0.9), (10, 1.0))).verdict == "regressed"


def test_a_creep_in_two_steps_counts_from_its_beginning() -> None:
    change = last_night(nights((30, 1.0), (20, 1.03), (20, 1.06)))
    assert (change.verdict, change.since) == ("regressed", 30)
    assert change.shift == pytest.approx(0.06, abs=0.005)


def test_nights_that_came_and_went_are_not_where_a_later_slowdown_began() -> None:
    """The level was as good as the old one in between; it is slow since night 53."""
    change = last_night(nights((25, 1.0), (8, 1.2), (20, 1.005), (8, 1.1)))
    assert (change.verdict, change.since) == ("regressed", 53)
    assert change.shift == pytest.approx(0.1, abs=0.005)


@pytest.mark.parametrize("slow", [2, 3])
def test_a_slowdown_began_with_its_first_night_though_a_cut_takes_three(slow: int) -> None:
    change = last_night(nights((40, 1.0), (slow, 1.3)))
    assert change.verdict in ("regressed", "suspect")
    assert change.since == 40


@pytest.mark.parametrize("slow", [1, 3])
def test_nights_too_few_for_a_level_are_suspect_since_the_first_of_them(slow: int) -> None:
    """Of three slow nights among 21 two in 1,330 orders have them at an end, which is too many even to suspect."""
    change = last_night(nights((21 - slow, 1.0), (slow, 1.3)))
    assert (change.verdict, change.since) == ("suspect", 21 - slow)


def test_what_was_accepted_is_the_baseline() -> None:
    slower = nights((40, 1.0), (20, 1.1))
    assert last_night(slower, accepted=39).verdict == "regressed"
    assert last_night(slower, accepted=41).verdict == "ok"
    again = last_night([*slower, *nights((15, 1.2), seed=1)], accepted=41)
    assert (again.verdict, again.since) == ("regressed", 60)
    assert again.shift == pytest.approx(1.2 / 1.1 - 1, abs=0.005)


def test_one_odd_night_is_suspect_and_no_more() -> None:
    change = last_night([*nights((40, 1.0)), math.log(1.3)])
    assert (change.verdict, change.since) == ("suspect", 40)
    assert change.shift == pytest.approx(0.3, abs=0.01)
    assert last_night([*nights((40, 1.0)), math.log(1.3), 0.0]).verdict == "ok"
    assert last_night([*nights((40, 1.0)), math.log(0.7)]).verdict == "ok", "faster by chance is nobody's trouble"


def test_what_may_yet_be_chance_is_suspect() -> None:
    """Three slow nights of 31: of 4,495 orders two have them at an end, which is more than one in 10,000."""
    change = last_night(nights((28, 1.0), (3, 1.04)))
    assert (change.verdict, change.since) == ("suspect", 28)
    assert last_night(nights((28, 1.0), (6, 1.04))).verdict == "regressed", "two in 1,344,904"


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        last_night([math.inf] * MIN_NIGHTS)


def test_equal_nights_are_ok() -> None:
    assert last_night([0.0] * 30) == TimeChange(verdict="ok")
