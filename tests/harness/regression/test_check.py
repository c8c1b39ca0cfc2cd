"""The check: each verdict from runs that deserve it, and what it says of them."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from harness.regression import check_report
from harness.regression.check import check
from tests.harness.regression.nights import ACCEPTED, BYTES, DAY, FIRST_NIGHT, SLOWER, case_run, checked, nights, only


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


@pytest.mark.parametrize(
    ("status", "verdict", "is_red"), [("unavailable", "suspect", False), ("unsupported", "failed", True)]
)
def test_a_case_that_ran_and_cannot_tonight(status: str, verdict: str, is_red: bool) -> None:
    """What our own code refuses is its regression. What is not built has no fingerprint of the machine either."""
    runs = nights([1.0] * 25)
    beside = nights([1.0] * 26, case_id="other")
    lost = case_run(25, status=status, reason="no deepspeed", machine="", metrics={})
    last = check([lost, beside[-1]], [*runs, *beside], ACCEPTED)
    (case, _) = last.cases
    assert (case.verdict, last.is_red) == (verdict, is_red)
    assert check_report.reasons(case) == [
        f"ran until smoke-24, tonight {status}: no deepspeed; where that is intended, `meshmark accept`"
    ]
    never = replace(lost, case_id="never")
    elsewhere = [replace(run, case_id="never", machine="m2") for run in runs]
    (case, _) = check([never, beside[-1]], [*elsewhere, *beside], ACCEPTED).cases
    assert (case.verdict, check_report.reasons(case)) == ("insufficient data", [f"{status}: no deepspeed"])
    # Night 24 is the 90th before tonight's, then the 91st.
    for num_nights, then in ((114, verdict), (115, "insufficient data")):
        tonight = replace(lost, suite_run="tonight", started=FIRST_NIGHT + num_nights * DAY)
        (case,) = check([tonight], [*runs, *nights([1.0] * num_nights, case_id="other")], ACCEPTED).cases
        assert case.verdict == then


@pytest.mark.parametrize("status", ["unavailable", "unsupported"])
def test_a_case_that_parts_as_expected_has_run_too(status: str) -> None:
    runs = nights([1.0] * 3, status="parity failed", expected="parity failed")
    judged = checked([*runs, case_run(3, status=status, reason="no deepspeed", machine="", metrics={})])
    assert "ran until smoke-02" in only(judged)[1]
    unexpected = [replace(run, expected="ok") for run in runs]
    judged = checked([*unexpected, case_run(3, status=status, reason="no deepspeed", machine="", metrics={})])
    assert only(judged)[0] == "insufficient data"


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
