"""In turns: the order of the runs, who gets more pairs, and what becomes of a case that cannot be timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.case import Case
from harness.layout import Layout
from harness.paired import in_turns
from harness.paired.builds import Build
from harness.paired.in_turns import ComparedCase, time_in_turns
from harness.paired.side import Timing
from harness.regression.paired_comparison import FIRST_PAIRS, MOST_PAIRS, Comparison

CASES = [Case(workload="gpt", implementation="native.ddp", layout=Layout(data=size)) for size in (2, 3, 4)]
FIRST, SECOND, THIRD = CASES


class KnownSide:
    """A side whose every timing is known beforehand; both sides of a comparison write down who was asked for what."""

    def __init__(self, name: str, times: Callable[[Case, int], Timing], asked: list[tuple[str, str]]) -> None:
        self.build = Build(name=name, commit="", source=Path(), python=Path(), scratch=Path())
        self._times = times
        self._asked = asked

    def time(self, case: Case) -> Timing:
        number = self._asked.count((self.build.name, case.id))
        self._asked.append((self.build.name, case.id))
        return self._times(case, number)


class Silent:
    def pairs_done(self, case: Case, done: int, total: int, a_seconds: float, b_seconds: float) -> None:
        pass

    def case_ended(self, case: Case, reason: str) -> None:
        pass


def noisy(sd: float, seed: int, factor: float = 1.0, of: tuple[Case, ...] = ()) -> Callable[[Case, int], Timing]:
    """Times with log-normal noise, `factor` times as long for the cases `of`."""
    random = np.random.default_rng(seed)

    def times(case: Case, _number: int) -> Timing:
        return Timing(status="ok", seconds=0.1 * float(np.exp(random.normal(0, sd))) * (factor if case in of else 1.0))

    return times


def compared(a: Callable[[Case, int], Timing], b: Callable[[Case, int], Timing]) -> dict[str, ComparedCase]:
    asked: list[tuple[str, str]] = []
    found = time_in_turns(CASES, KnownSide("A", a, asked), KnownSide("B", b, asked), Silent())
    return {result.case.id: result for result in found}


def test_pairs_come_as_abba_case_by_case() -> None:
    asked: list[tuple[str, str]] = []
    time_in_turns(CASES[:2], KnownSide("A", noisy(0.001, 0), asked), KnownSide("B", noisy(0.001, 1), asked), Silent())
    turn = [*(("A", "B", "B", "A")), *(("A", "B", "B", "A"))]
    assert [side for side, _ in asked] == turn * (FIRST_PAIRS // 2)
    assert [case for _, case in asked[:8]] == [FIRST.id] * 4 + [SECOND.id] * 4


def test_only_what_is_slower_is_red_and_only_what_is_undecided_takes_more_pairs() -> None:
    slow = noisy(0.002, 1, 1.1, of=(SECOND,))
    found = compared(noisy(0.002, 0), lambda case, n: slow(case, n) if case != THIRD else noisy(0.2, n)(case, n))
    assert [found[case.id].verdict for case in CASES[:2]] == ["ok", "regressed"]
    comparison = found[SECOND.id].comparison
    assert comparison is not None
    assert comparison.shift == pytest.approx(0.1, abs=0.01)
    assert [len(found[case.id].a) for case in CASES] == [FIRST_PAIRS, FIRST_PAIRS, MOST_PAIRS]
    assert all(len(result.a) == len(result.b) for result in found.values())


def test_a_faster_revision_is_an_improvement() -> None:
    found = compared(noisy(0.002, 0), noisy(0.002, 1, 0.9, of=(FIRST, SECOND, THIRD)))
    assert {result.verdict for result in found.values()} == {"improved"}


def test_nothing_changed_is_quiet() -> None:
    """60 comparisons of three cases with 5 % of noise: at a rate of 0.005, adjusted, a false alarm is rare."""
    alarms = 0
    for seed in range(60):
        found = compared(noisy(0.05, 2 * seed), noisy(0.05, 2 * seed + 1))
        alarms += any(result.verdict == "regressed" for result in found.values())
    assert alarms <= 1


def test_p_values_are_adjusted_over_the_suite() -> None:
    found = compared(noisy(0.002, 0), noisy(0.002, 1, 1.1, of=(SECOND,)))
    result = found[SECOND.id]
    assert result.comparison is not None
    assert result.p_value == pytest.approx(3 * result.comparison.p_value)


@pytest.mark.parametrize(
    ("a_status", "b_status", "verdict", "reason"),
    [
        ("ok", "failed", "failed", "B: gone"),
        ("ok", "timed out", "failed", "B: gone"),
        ("failed", "ok", "not compared", "A: gone"),
        ("failed", "failed", "not compared", "A: gone"),
        ("unavailable", "unavailable", "not compared", "A: gone"),
        ("ok", "unsupported", "failed", "B: gone"),  # what A trains and B refuses
        ("ok", "unavailable", "failed", "B: gone"),
    ],
)
def test_a_case_that_cannot_be_timed_ends_there_and_the_others_go_on(
    a_status: str, b_status: str, verdict: str, reason: str
) -> None:
    def side(name: str, status: str, seed: int) -> Callable[[Case, int], Timing]:
        times = noisy(0.002, seed)

        def one(case: Case, number: int) -> Timing:
            gone = case == FIRST and status != "ok"
            return Timing(status=status, reason=f"{name}: gone") if gone else times(case, number)

        return one

    found = compared(side("A", a_status, 0), side("B", b_status, 1))
    assert (found[FIRST.id].verdict, found[FIRST.id].reason) == (verdict, reason)
    assert found[FIRST.id].comparison is None
    assert [found[case.id].verdict for case in (SECOND, THIRD)] == ["ok", "ok"]


@pytest.mark.parametrize("name", ["A", "B"])
def test_what_fails_once_is_timed_again_and_said(name: str) -> None:
    """One launch of many that meets a full disk."""

    def hiccuping(times: Callable[[Case, int], Timing]) -> Callable[[Case, int], Timing]:
        return lambda case, number: (
            Timing(status="failed", reason="no space left") if (case, number) == (FIRST, 3) else times(case, number)
        )

    sides = {"A": noisy(0.002, 0), "B": noisy(0.002, 1)}
    found = compared(*(hiccuping(times) if name == side else times for side, times in sides.items()))
    assert (found[FIRST.id].verdict, found[FIRST.id].reason) == ("ok", "failed once, not again: no space left")
    assert len(found[FIRST.id].a) == len(found[FIRST.id].b) == FIRST_PAIRS
    assert [timing.reason for timing in found[FIRST.id].hiccups] == ["no space left"]
    assert not found[SECOND.id].reason


def test_what_fails_a_second_time_has_failed() -> None:
    def flaky(case: Case, number: int) -> Timing:
        times = noisy(0.002, number)
        return Timing(status="failed", reason="a race") if case == FIRST and number in (3, 7) else times(case, number)

    found = compared(noisy(0.002, 0), flaky)
    assert (found[FIRST.id].verdict, found[FIRST.id].reason) == ("failed", "a race")


def test_what_others_more_pairs_make_doubtful_takes_more_pairs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first regresses by a hair at ten pairs; at twenty the third, undecided so far, is ok, which raises the
    adjusted p-value of the first."""

    def verdicts(comparisons: list[Comparison]) -> list[str]:
        numbers = [each.num_pairs for each in comparisons]
        if numbers == [FIRST_PAIRS] * 3:
            return ["regressed", "ok", "undecided"]
        return ["undecided" if numbers[0] == FIRST_PAIRS else "regressed", "ok", "ok"]

    monkeypatch.setattr(in_turns, "verdicts", verdicts)
    found = compared(noisy(0.002, 0), noisy(0.002, 1, 1.1, of=(FIRST,)))
    assert [len(found[case.id].a) for case in CASES] == [MOST_PAIRS, FIRST_PAIRS, MOST_PAIRS]
    assert found[FIRST.id].verdict == "regressed"


def test_a_failure_of_both_after_some_pairs_is_not_bs_fault() -> None:
    """The machine's memory is full, say."""
    times = noisy(0.002, 0)

    def failing(case: Case, number: int) -> Timing:
        return times(case, number) if number < 3 else Timing(status="failed", reason="no memory")

    assert {result.verdict for result in compared(failing, failing).values()} == {"not compared"}
