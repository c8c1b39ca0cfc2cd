"""The finding on a case's time: whose doing it is that a level has moved."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from harness.regression.check import Check
from tests.harness.regression.nights import SLOWER, checked, nights, only


@pytest.mark.parametrize("level", [1.1, 0.9])
def test_where_the_same_commit_ran_before_and_after_the_machine_changed(level: float) -> None:
    runs = nights([1.0] * 20 + [level] * 8, commit="c0ffee00")
    verdict, why = only(checked(runs))
    assert verdict == "environment shift"
    assert why.startswith("environment shift: the same commit ran before and after: the machine changed, not the code")
    moved = {1.1: "regressed", 0.9: "improved"}[level]
    assert only(checked([replace(run, dirty=True) for run in runs]))[0] == moved, "not the code of any commit"
    one_night_away = [replace(run, commit="decaf") for run in runs[:19]]
    assert only(checked([*one_night_away, *runs[19:]]))[0] == moved, "the night is not known that well"
    assert only(checked([replace(run, commit="") for run in runs]))[0] == moved


def test_a_later_regression_does_not_hide_behind_an_environment_shift() -> None:
    runs = nights([1.0] * 30 + [1.1] * 30 + [1.1 * 1.08] * 20)
    shifted = [*runs[:30], *(replace(run, versions={"torch": "2.14.0"}) for run in runs[30:])]
    assert only(checked(shifted[:60]))[0] == "environment shift"
    judged = checked(shifted)
    verdict, why = only(judged)
    assert (verdict, judged.is_red) == ("regressed", True)
    assert "slower since smoke-60, commit 0000003b -> 0000003c; besides, +" in why
    assert why.endswith(" since smoke-30, an environment shift: torch 2.13.0 -> 2.14.0")
    (case,) = judged.cases
    assert case.time is not None
    assert case.time.commits == ("0000003b", "0000004f")
    assert case.time.shift == pytest.approx(0.08, abs=0.005)


def test_two_environment_shifts_are_both_named() -> None:
    runs = nights([1.0] * 30 + [1.1] * 30 + [1.2] * 20)
    versions = [{"torch": torch} for torch in ["2.13.0"] * 30 + ["2.14.0"] * 30 + ["2.15.0"] * 20]
    verdict, why = only(checked([replace(run, versions=of) for run, of in zip(runs, versions, strict=True)]))
    assert verdict == "environment shift"
    assert why.startswith("environment shift: torch 2.13.0 -> 2.14.0, torch 2.14.0 -> 2.15.0; step time: 20.")


def test_new_software_at_the_change_is_an_environment_shift() -> None:
    runs = nights(SLOWER)
    shifted = [replace(run, versions={"torch": "2.14.0"}, environment="e2") for run in runs[20:]]
    verdict, why = only(checked([*runs[:20], *shifted]))
    assert verdict == "environment shift"
    assert why.startswith("environment shift: torch 2.13.0 -> 2.14.0; step time: 10.")
    unnamed = [replace(run, environment="e2") for run in runs[20:]]
    assert "environment e1 -> e2" in only(checked([*runs[:20], *unnamed]))[1]
    long_before = [replace(run, environment="e0") for run in runs[:10]]
    assert only(checked([*long_before, *runs[10:]]))[0] == "regressed", "what changed ten nights before is no excuse"


def test_a_slower_version_of_a_baseline_is_a_regression_of_that_baseline() -> None:
    runs = nights(SLOWER, implementation="deepspeed.zero", versions={"deepspeed": "0.19.8"})
    judged = checked([*runs[:20], *(replace(run, versions={"deepspeed": "0.20.0"}) for run in runs[20:])])
    verdict, why = only(judged)
    assert verdict == "regressed"
    assert why.startswith("deepspeed 0.20.0 is slower than deepspeed 0.19.8; step time: ")
    assert why.endswith("; environment shift: deepspeed 0.19.8 -> 0.20.0")


def of_deepspeed(levels: list[float], since: int) -> Check:
    """With 0.20.0 in place of 0.19.8 from night `since` on."""
    runs = nights(levels, implementation="deepspeed.zero", versions={"deepspeed": "0.19.8"})
    return checked([*runs[:since], *(replace(run, versions={"deepspeed": "0.20.0"}) for run in runs[since:])])


def test_a_faster_version_of_a_baseline_is_not_blamed_for_our_commit() -> None:
    (case,) = of_deepspeed([1.0] * 30 + [1.1] * 30 + [1.06] * 20, since=60).cases
    assert case.verdict == "regressed"
    assert case.time is not None
    assert case.time.commits == ("0000001d", "0000004f")
    assert re.fullmatch(r"step time: [56]\.\d% slower since smoke-30, commit 0000001d -> 0000001e", case.time.text)


def test_a_slower_version_after_our_commit_is_named_and_the_commits_are_timed() -> None:
    (case,) = of_deepspeed([1.0] * 30 + [1.1] * 30 + [1.2] * 20, since=60).cases
    assert case.time is not None
    assert case.time.commits == ("0000001d", "0000004f")
    assert case.time.text.startswith("step time: ")
    assert re.search(r"; besides, \+9\.\d% since smoke-60: deepspeed 0\.20\.0 is slower than", case.time.text)


def test_our_commit_after_a_slower_version_is_named() -> None:
    (case,) = of_deepspeed([1.0] * 30 + [1.1] * 30 + [1.2] * 20, since=30).cases
    assert case.time is not None
    assert case.time.commits is None
    assert case.time.text.startswith("deepspeed 0.20.0 is slower than deepspeed 0.19.8; step time: ")
    assert re.search(r"; besides, \+9\.\d% since smoke-60, commit 0000003b -> 0000003c$", case.time.text)
