"""Confirmation: what is nominated, and what is said where two revisions cannot be timed. (tests/harness/paired times
them.)"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from harness.case import Case
from harness.layout import Layout
from harness.paired.builds import Build
from harness.paired.in_turns import ComparedCase, ComparedVerdict
from harness.paired.paired_report import PairedRun
from harness.regression import check_report, confirmation
from harness.regression.accepted_values import Accepted
from harness.regression.check import Check, check
from harness.regression.check_report import shown
from harness.regression.confirmation import Interrupted, _said, confirm, this_machine
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


def notes(judged: Check, at_hand: dict[str, Case], machine: str | None = None) -> list[str]:
    """What is said of what was not timed, on a machine of that fingerprint; the verdict stays history's."""
    machine_of = None if machine is None else lambda device: machine
    confirmed = confirm(judged, at_hand, Path(__file__).parent, machine_of=machine_of, tell=print)
    (case,) = confirmed.cases
    assert (case, confirmed.is_red) == (judged.cases[0], True)
    assert shown(case) == "regressed (by history)"
    return [note for note in confirmed.notes if "in turns" in note]


def test_what_cannot_be_timed_stays_as_the_history_says() -> None:
    (note,) = notes(checked(moved()), {CASE.id: CASE})
    assert note.startswith("1 not timed in turns: 00000013: expected a revision of ")
    assert notes(checked(moved()), {}) == [
        "1 not timed in turns: suite smoke is not at hand, or has no such case",
    ]


def test_another_machine_than_the_historys_is_left_alone_unless_it_is_asked_for() -> None:
    assert notes(checked(moved()), {CASE.id: CASE}, "m2") == [
        "1 not timed in turns: this machine is m2, the history is that of m1"
    ]
    (note,) = notes(checked(moved()), {CASE.id: CASE}, "m1")
    assert "expected a revision" in note, "here it would have been timed"
    assert len(this_machine()("cpu")) == 12


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([*moved()[:-1], replace(moved()[-1], commit="00000013")], "both nights ran 00000013"),
        ([replace(run, commit="") for run in moved()], "the commit of smoke-19 is not known"),
        ([*moved()[:-1], replace(moved()[-1], dirty=True)], "smoke-27 ran with local changes to 0000001b"),
    ],
)
def test_without_two_commits_it_says_why(runs: list[CaseRun], why: str) -> None:
    assert notes(checked(runs), {CASE.id: CASE}, "m1") == [f"1 not timed in turns: {why}"]


def test_another_version_of_a_library_is_no_commit() -> None:
    runs = [replace(run, implementation="deepspeed.zero") for run in moved(deepspeed="0.20.0")]
    (note,) = notes(checked(runs), {CASE.id: CASE})
    assert "deepspeed is another version; `meshmark compare --peer` times two of them" in note


def builds_of(commits: tuple[str, str]) -> tuple[Build, Build]:
    a, b = (
        Build(name=commit, commit=commit, source=Path(), python=Path(), scratch=Path(letter))
        for commit, letter in zip(commits, "ab", strict=True)
    )
    return a, b


class Pairs:
    """Stands in for real timings: every case regressed, until `then` is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *then: BaseException) -> None:
        self.timed: list[str] = []
        self._then = list(then)
        monkeypatch.setattr(confirmation.builds, "of_revisions", lambda commits, repository, tell: commits)
        monkeypatch.setattr(confirmation.paired_run, "run", self.run)

    def run(self, suite: str, cases: list[Case], commits: tuple[str, str], **options: object) -> PairedRun:
        if self.timed and self._then:
            raise self._then.pop(0)
        self.timed += [case.id for case in cases]
        compared = [ComparedCase(case=case, verdict="regressed", comparison=COMPARISON, a=(), b=()) for case in cases]
        a, b = builds_of(commits)
        return PairedRun(a=a, b=b, suite=suite, started=0.0, ended=1.0, cases=tuple(compared))


def several(num_cases: int) -> tuple[Check, dict[str, Case]]:
    """Cases that are slower by 10 %, 11 %, ... since two nights in turn, beside as many that are not."""
    cases = {case.id: case for case in (replace(CASE, workload=f"gpt:seed={seed}") for seed in range(num_cases))}
    runs = []
    for number, case_id in enumerate(cases):
        level = 1.1 + number / 100
        slower = nights([1.0] * (20 + number % 2) + [level] * (8 - number % 2), seed=number, case_id=case_id)
        runs += [*slower, *nights([1.0] * 28, seed=number, case_id=f"quiet-{number}")]
    return check([run for run in runs if run.suite_run == "smoke-27"], runs, Accepted()), cases


def test_the_five_that_are_slower_by_most_are_timed_and_on_request_all(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, cases = several(7)
    pairs = Pairs(monkeypatch)
    confirmed = confirm(judged, cases, Path(), machine_of=lambda device: "m1", tell=print)
    assert sorted(pairs.timed) == sorted([*cases][2:])
    *_, note = confirmed.notes
    assert note == "2 not timed in turns: 5 others come first (regressed, then slowest); --confirm times all"
    assert [shown(case) for case in confirmed.cases].count("regressed (by history)") == 2
    everything = Pairs(monkeypatch)
    assert confirm(judged, cases, Path(), machine_of=None, tell=print).notes == judged.notes
    assert sorted(everything.timed) == sorted(cases)


def test_on_a_machine_that_is_to_be_looked_at_first_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, cases = several(4)
    slower = replace(judged, doubted_machines=frozenset({"m1"}))
    pairs = Pairs(monkeypatch)
    confirmed = confirm(slower, cases, Path(), machine_of=lambda device: "m1", tell=print)
    assert (confirmed.cases, pairs.timed) == (judged.cases, [])
    assert confirmed.notes[-1] == (
        "4 not timed in turns: machine m1 is to be looked at first; --confirm times them all the same"
    )
    confirm(slower, cases, Path(), machine_of=None, tell=print)
    assert sorted(pairs.timed) == sorted(cases)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), subprocess.TimeoutExpired("git", 5), ValueError("no revision")]
)
def test_what_goes_wrong_costs_a_note(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    judged, cases = several(2)
    Pairs(monkeypatch, error)
    confirmed = confirm(judged, cases, Path(), machine_of=None, tell=print)
    assert confirmed.is_red
    assert sorted(shown(case) for case in confirmed.cases[:2]) == ["regressed (by history)", "regressed (confirmed)"]
    assert confirmed.notes[-1] == f"1 not timed in turns: {error}"


def test_interrupted_it_has_what_was_said_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, cases = several(2)
    interrupt = KeyboardInterrupt()
    Pairs(monkeypatch, interrupt)
    with pytest.raises(Interrupted) as raised:
        confirm(judged, cases, Path(), machine_of=None, tell=print)
    assert raised.value.interrupt is interrupt
    after = raised.value.checked
    assert sorted(shown(case) for case in after.cases[:2]) == ["regressed (by history)", "regressed (confirmed)"]
    assert after.notes[-1].startswith("timing in turns was interrupted")


def test_pairs_are_kept_or_a_note_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, cases = several(1)
    Pairs(monkeypatch)
    kept: list[PairedRun] = []

    def keep(run: PairedRun) -> Path:
        kept.append(run)
        return Path("pairs.json")

    confirmed = confirm(judged, cases, Path(), machine_of=None, tell=print, keep=keep)
    assert confirmed.notes[-1] == "every time of 00000013 and 0000001b in turns: pairs.json"
    assert [case.case.id for case in kept[0].cases] == [*cases]

    def fail(run: PairedRun) -> Path:
        raise OSError(28, "No space left on device")

    confirmed = confirm(judged, cases, Path(), machine_of=None, tell=print, keep=fail)
    assert shown(confirmed.cases[0]) == "regressed (confirmed)"
    assert confirmed.notes[-1].endswith("are not kept: [Errno 28] No space left on device")


@pytest.mark.parametrize(
    ("verdict", "comparison", "expected"),
    [
        ("regressed", COMPARISON, ("regressed", "slower; confirmed: +12.3% (+9.8% to +14.9%) in 10 pairs")),
        ("ok", COMPARISON, ("suspect", "slower; not confirmed: +12.3% (+9.8% to +14.9%) in 10 pairs")),
        ("improved", COMPARISON, ("suspect", "slower; not confirmed: +12.3% (+9.8% to +14.9%) in 10 pairs")),
        ("failed", None, ("failed", "slower; in turns it fails: no memory")),
    ],
)
def test_what_the_pairs_say_decides(
    verdict: ComparedVerdict, comparison: Comparison | None, expected: tuple[str, str]
) -> None:
    finding = Finding(figure="step.median_seconds", verdict="regressed", text="slower")
    compared = ComparedCase(case=CASE, verdict=verdict, reason="no memory", comparison=comparison, a=(), b=())
    said = _said(finding, compared)
    assert (said.verdict, said.text) == expected
    assert said.confirmed == {"regressed": True, "suspect": False}.get(said.verdict)


@pytest.mark.parametrize(
    ("verdict", "word"), [("regressed", "regressed (confirmed)"), ("ok", "suspect (not confirmed)")]
)
def test_what_was_confirmed_reads_otherwise_than_what_was_not(verdict: ComparedVerdict, word: str) -> None:
    judged = checked(moved())
    (case,) = judged.cases
    assert shown(case) == "regressed (by history)"
    assert case.time is not None
    compared = ComparedCase(case=CASE, verdict=verdict, comparison=COMPARISON, a=(), b=())
    after = replace(judged, cases=(replace(case, findings=(_said(case.time, compared),)),))
    assert shown(after.cases[0]) == word
    assert f"1 {word}" in check_report.summary(after)
    assert f"| {word} |" in check_report.markdown(after)
    fewer = replace(judged, cases=(replace(case, findings=(*case.findings, replace(case.time, figure="loss"))),))
    assert shown(fewer.cases[0]) == "regressed", "an exact figure is worse as well, which needs no pairs"
