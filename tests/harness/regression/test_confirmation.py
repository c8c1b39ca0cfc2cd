"""Confirmation: what is nominated, and what is said where two revisions cannot be timed. (tests/harness/paired times
them.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.case import Case
from harness.layout import Layout
from harness.paired.in_turns import ComparedCase, ComparedVerdict
from harness.regression.accepted_values import Accepted
from harness.regression.check import Check, check
from harness.regression.confirmation import _said, confirm
from harness.regression.history import CaseRun
from harness.regression.paired_comparison import Comparison
from harness.regression.verdicts import Finding
from tests.harness.regression.nights import nights

CASE = Case(workload="gpt", implementation="native.ddp", layout=Layout(data=2))
SLOWER = [1.0] * 20 + [1.1] * 8
COMPARISON = Comparison(num_pairs=10, shift=0.123, interval=(0.098, 0.149), p_value=0.001)


def moved(**versions: str) -> list[CaseRun]:
    """A level that moves at night 20, with the commit and perhaps with a library."""
    runs = [replace(run, case_id=CASE.id) for run in nights(SLOWER)]
    return [
        replace(run, commit=f"{night:08x}", versions=versions if night >= 20 and versions else run.versions)
        for night, run in enumerate(runs)
    ]


def checked(runs: list[CaseRun]) -> Check:
    return check(runs[-1:], runs, Accepted())


def commits(judged: Check) -> tuple[str, str] | None:
    (case,) = judged.cases
    assert case.time is not None
    return case.time.commits


def test_the_last_commit_before_and_tonights_are_nominated() -> None:
    assert commits(checked(moved())) == ("00000013", "0000001b")


def test_what_the_code_cannot_have_done_is_not() -> None:
    assert commits(checked(moved(torch="2.14.0"))) is None
    assert commits(checked([replace(run, commit="c0ffee") for run in moved()])) is None, "the same code"
    assert commits(checked([replace(run, commit="") for run in moved()])) is None, "nobody knows which"
    assert commits(checked([*moved()[:-1], replace(moved()[-1], dirty=True)])) is None, "not the code of any commit"
    assert commits(checked(moved()[:20])) is None, "nothing has moved"


@pytest.mark.parametrize(
    ("at_hand", "expected"),
    [
        ({CASE.id: CASE}, "; not timed in turns: 00000013: expected a revision of"),
        ({}, "; not timed in turns: suite smoke is not at hand, or has no such case"),
    ],
)
def test_what_cannot_be_timed_stays_as_the_history_says(at_hand: dict[str, Case], expected: str) -> None:
    judged = checked(moved())
    confirmed = confirm(judged, at_hand, Path(__file__).parent, tell=print)
    (case,) = confirmed.cases
    assert (case.verdict, confirmed.is_red) == ("regressed", True)
    assert case.time is not None
    assert expected in case.time.text


@pytest.mark.parametrize(
    ("verdict", "comparison", "expected"),
    [
        ("regressed", COMPARISON, ("regressed", "slower; confirmed: +12.3% (+9.8% to +14.9%) in 10 pairs")),
        ("ok", COMPARISON, ("suspect", "slower; not confirmed: +12.3% (+9.8% to +14.9%) in 10 pairs")),
        ("improved", COMPARISON, ("suspect", "slower; not confirmed: +12.3% (+9.8% to +14.9%) in 10 pairs")),
        ("failed", None, ("failed", "slower; in turns it fails: no memory")),
        ("not compared", None, ("regressed", "slower; not timed in turns: no memory")),
    ],
)
def test_what_the_pairs_say_decides(
    verdict: ComparedVerdict, comparison: Comparison | None, expected: tuple[str, str]
) -> None:
    finding = Finding(figure="step.median_seconds", verdict="regressed", text="slower")
    compared = ComparedCase(case=CASE, verdict=verdict, reason="no memory", comparison=comparison, a=(), b=())
    said = _said(finding, compared)
    assert (said.verdict, said.text) == expected
