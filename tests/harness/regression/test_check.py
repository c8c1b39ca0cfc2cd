"""The check: each verdict from runs that deserve it, what it says of them, and what accepting changes."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from harness.regression import check_report
from harness.regression.acceptance import accept
from harness.regression.accepted_values import Accepted
from harness.regression.check import Check, check
from harness.regression.history import CaseRun
from tests.harness.regression.nights import BYTES, DAY, FIRST_NIGHT, case_run, nights

PLACE = ("native.ddp-data2-0", "cpu")
ACCEPTED = Accepted(values={PLACE: {BYTES: 1000.0}})
NOW = FIRST_NIGHT + 100 * DAY
SLOWER = [1.0] * 20 + [1.1] * 8


def checked(runs: list[CaseRun], accepted: Accepted = ACCEPTED) -> Check:
    """The check of the last night among the runs."""
    last = max(runs, key=lambda run: run.started).suite_run
    return check([run for run in runs if run.suite_run == last], runs, accepted)


def only(judged: Check) -> tuple[str, str]:
    (case,) = judged.cases
    return case.verdict, "; ".join(check_report.reasons(case))


def test_a_quiet_history_is_ok() -> None:
    judged = checked(nights([1.0] * 30))
    assert only(judged) == ("ok", "")
    assert not judged.is_red
    assert judged.notes == ()


def test_a_slowdown_is_red_and_says_since_when() -> None:
    judged = checked([replace(run, commit=f"commit{night:02}") for night, run in enumerate(nights(SLOWER))])
    verdict, why = only(judged)
    assert (verdict, judged.is_red) == ("regressed", True)
    assert "slower since smoke-20, commit commit19 -> commit20" in why


def test_a_time_that_is_gone_is_suspect() -> None:
    runs = nights([1.0] * 25)
    timeless = {name: value for name, value in runs[-1].metrics.items() if not name.startswith("step.")}
    verdict, why = only(checked([*runs[:-1], replace(runs[-1], metrics=timeless)]))
    assert verdict == "suspect"
    assert why == "step time: not measured, 24 nights before have it, the last one smoke-23"


def test_a_slow_machine_is_not_slow_code() -> None:
    """Step and canary take longer alike."""
    runs = nights(SLOWER)
    slow = [replace(run, metrics={**run.metrics, "canary.seconds": 0.011}) for run in runs[20:]]
    assert only(checked([*runs[:20], *slow])) == ("ok", "")


def test_nights_elsewhere_do_not_count() -> None:
    runs = nights([1.0] * 30)
    assert only(checked([*runs[:-1], replace(runs[-1], machine="m2")])) == (
        "insufficient data",
        "step time: night 1 on machine m2, history speaks from 20 on",
    )
    other_suite = [replace(run, suite="peers") for run in runs[:-1]]
    assert only(checked([*other_suite, runs[-1]]))[0] == "insufficient data"
    without_canary = {name: value for name, value in runs[-1].metrics.items() if not name.startswith("canary")}
    assert only(checked([*runs[:-1], replace(runs[-1], metrics=without_canary)])) == (
        "insufficient data",
        "step time: no canary was measured in its session",
    )


@pytest.mark.parametrize(
    ("fields", "verdict", "why", "red"),
    [
        (
            {"status": "parity failed", "explanation": "gradients are not reduced"},
            "parity failed",
            "gradients are",
            True,
        ),
        ({"status": "timed out", "reason": "rank 1 hangs"}, "failed", "timed out: rank 1 hangs", True),
        ({"metrics": {BYTES: 1001.0}}, "regressed", "bytes a step: 1,001, accepted is 1,000", True),
        ({"metrics": {BYTES: 999.0}}, "improved", "bytes a step: 999, accepted is 1,000", False),
    ],
)
def test_what_is_wrong_with_tonight(fields: dict[str, object], verdict: str, why: str, red: bool) -> None:
    runs = nights([1.0] * 25)
    judged = checked([*runs, case_run(25, **fields)])  # type: ignore[arg-type]
    assert only(judged)[0] == verdict
    assert why in only(judged)[1]
    assert judged.is_red == red


@pytest.mark.parametrize("status", ["unavailable", "unsupported"])
def test_a_case_that_ran_and_cannot_tonight_is_suspect(status: str) -> None:
    """What is not built has no fingerprint of the machine either."""
    runs = nights([1.0] * 25)
    beside = nights([1.0] * 26, case_id="other")
    lost = case_run(25, status=status, reason="no deepspeed", machine="", metrics={})
    last = check([lost, beside[-1]], [*runs, *beside], ACCEPTED)
    (case, _) = last.cases
    assert (case.verdict, last.is_red) == ("suspect", False)
    assert check_report.reasons(case) == [f"ran until smoke-24, tonight {status}: no deepspeed"]
    never = replace(lost, case_id="never")
    elsewhere = [replace(run, case_id="never", machine="m2") for run in runs]
    (case, _) = check([never, beside[-1]], [*elsewhere, *beside], ACCEPTED).cases
    assert (case.verdict, check_report.reasons(case)) == ("insufficient data", [f"{status}: no deepspeed"])


def test_a_case_that_parts_as_expected_is_ok() -> None:
    runs = nights([1.0] * 3, status="parity failed", explanation="gradients are not reduced")
    assert only(checked([replace(run, expected="parity failed") for run in runs])) == ("ok", "")
    assert only(checked(runs))[0] == "parity failed"
    blind = case_run(3, status="failed", reason="expected to part from the reference, and did not")
    assert only(checked([*runs, replace(blind, expected="parity failed")]))[0] == "failed"


def test_emulated_links_are_judged_on_exact_figures_alone() -> None:
    runs = nights(SLOWER, emulated=True)
    verdict, why = only(checked(runs))
    assert verdict == "insufficient data"
    assert why == "step time: not judged; its links are emulated, and the canary crosses none"
    more_bytes = replace(runs[-1], metrics={**runs[-1].metrics, BYTES: 1001.0})
    assert only(checked([*runs[:-1], more_bytes]))[0] == "regressed"


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


def test_everything_slower_and_nothing_faster_points_at_the_machine() -> None:
    runs = [run for number in range(4) for run in nights(SLOWER, seed=number, case_id=f"case-{number}")]
    judged = checked(runs)
    assert judged.is_red
    assert "4 of 4 times on machine m1 regressed and none improved" in judged.notes[0]
    assert judged.doubted_machines == {"m1"}
    faster = nights([1.0] * 20 + [0.9] * 8, case_id="case-4")
    assert not any("machine" in note for note in checked([*runs, *faster]).notes)
    assert not checked([*runs, *faster]).doubted_machines


def test_cases_that_have_gone_are_counted() -> None:
    gone = nights([1.0] * 24, case_id="case-1")
    assert "1 of the suite run before are not in this one" in checked([*gone, *nights([1.0] * 25)]).notes


def test_accepting_a_slowdown_makes_it_the_baseline() -> None:
    runs = nights(SLOWER)
    judged = checked(runs)
    accepted, lines = accept(judged.cases, ACCEPTED, NOW)
    assert accepted.times == {PLACE: FIRST_NIGHT + 27 * DAY}
    assert accepted.values == ACCEPTED.values
    assert [line.partition(" (")[0] for line in lines] == ["native.ddp data=2: accepted_time smoke-27"]
    assert only(checked(runs, accepted)) == ("ok", "")


def test_accepting_a_night_that_is_dated_ahead_accepts_no_slowdown_of_later_nights() -> None:
    runs = nights(SLOWER)
    judged = checked([*runs[:-1], replace(runs[-1], started=NOW + 1000 * DAY)])
    accepted, _ = accept(judged.cases, ACCEPTED, NOW)
    assert accepted.times == {PLACE: NOW}


def test_accepting_takes_over_what_is_new_or_has_moved_and_nothing_else() -> None:
    peak = "memory.peak_allocated_bytes.max_rank"
    runs = [
        *nights([1.0] * 25),
        case_run(25, metrics={BYTES: 900.0, peak: 1005.0, "communication.calls_per_step": 3.0}),
    ]
    before = Accepted(values={PLACE: {BYTES: 1000.0, peak: 1000.0}, ("other", "cpu"): {BYTES: 7.0}})
    judged = checked(runs, before)
    assert any(note.startswith("1 with exact figures that nothing is held against yet") for note in judged.notes)
    accepted, lines = accept(judged.cases, before, NOW)
    assert accepted.values == {
        PLACE: {BYTES: 900.0, peak: 1000.0, "communication.calls_per_step": 3.0},
        ("other", "cpu"): {BYTES: 7.0},
    }
    assert lines == [
        f"native.ddp data=2: {BYTES} 1,000 -> 900",
        "native.ddp data=2: communication.calls_per_step - -> 3",
    ]
    assert accept(checked(runs, accepted).cases, accepted, NOW) == (accepted, [])


def test_accepting_a_loss_after_more_steps_drops_that_after_fewer() -> None:
    before = Accepted(values={PLACE: {BYTES: 1000.0, "loss": 3.0, "loss.after_4_steps": 2.5}})
    judged = checked([case_run(0, precision="fp64", parity_steps=5, metrics={"loss": 2.25})], before)
    assert not judged.is_red
    assert any(note.startswith("1 with exact figures that nothing is held against yet") for note in judged.notes)
    accepted, lines = accept(judged.cases, before, NOW)
    assert accepted.values == {PLACE: {BYTES: 1000.0, "loss.after_5_steps": 2.25}}
    assert lines == ["native.ddp data=2: loss.after_5_steps - -> 2.25"]


def test_a_case_that_failed_cannot_be_accepted() -> None:
    judged = checked([*nights([1.0] * 25), case_run(25, status="parity failed", metrics={BYTES: 1.0})])
    assert accept(judged.cases, ACCEPTED, NOW) == (ACCEPTED, [])


def test_the_reports_say_the_same() -> None:
    markup = "x | [bold]<b>"
    runs = [*nights(SLOWER), *nights([1.0] * 28, case_id="other", name="torch.ddp data=2", workload=markup)]
    judged = checked(runs)
    page = check_report.markdown(judged)
    assert page.startswith("**RED: smoke-27: 1 regressed (by history), 1 ok**\n\n| verdict | case | workload | why |\n")
    assert "| regressed (by history) | native.ddp data=2 | gpt, fp32 | step time: 10." in page
    assert "torch.ddp" not in page, "what is ok is counted only"
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(check_report.text(judged))
    shown = captured.get()
    assert markup in shown
    assert "RED: smoke-27: 1 regressed (by history), 1 ok" in shown
    data = check_report.to_json(judged)
    assert (data["red"], data["suite_run"]) == (True, "smoke-27")
    (first, _) = data["cases"]
    assert (first["verdict"], first["findings"][-1]["since"], first["accept"]) == ("regressed", "smoke-20", True)
    escaped = checked([replace(run, workload=markup) for run in nights(SLOWER)])
    assert r"x \| \[bold\]\<b\>" in check_report.markdown(escaped)
