"""Acceptance: what is new, has moved or is gone is taken over, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.regression.acceptance import accept
from harness.regression.accepted_values import Accepted
from tests.harness.regression.nights import (
    ACCEPTED,
    BYTES,
    DAY,
    FIRST_NIGHT,
    PLACE,
    SLOWER,
    case_run,
    checked,
    nights,
    only,
)

NOW = FIRST_NIGHT + 100 * DAY


@pytest.mark.parametrize("status", ["unavailable", "unsupported"])
def test_what_need_not_run_any_more_can_be_accepted_until_it_runs_again(status: str) -> None:
    runs = [replace(run, device="cuda") for run in nights([1.0] * 30)]
    gone = [case_run(night, status=status, reason="no deepspeed", machine="", metrics={}) for night in range(30)]
    judged = checked([*runs[:20], gone[20]])
    assert judged.cases[0].moved
    accepted, lines = accept(judged.cases, ACCEPTED, NOW)
    assert accepted.absences == {("native.ddp-data2-0", "cuda"): FIRST_NIGHT + 20 * DAY}, "where it ran"
    assert (accepted.values, accepted.times) == (ACCEPTED.values, {})
    assert lines == ["native.ddp data=2: accepted_absence smoke-20 (ran until smoke-19)"]
    for night in (20, 21):
        later = checked([*runs[:20], *gone[20 : night + 1]], accepted)
        assert only(later) == ("insufficient data", f"{status}: no deepspeed")
        assert accept(later.cases, accepted, NOW) == (accepted, [])
    again = checked([*runs[:20], gone[20], *runs[21:25], gone[25]], accepted)
    assert "ran until smoke-24" in only(again)[1]


def test_what_is_not_measured_any_more_can_be_accepted() -> None:
    runs = nights([1.0] * 25)
    before = Accepted(values={PLACE: {BYTES: 1000.0, "communication.calls_per_step": 3.0}})
    untimed = replace(case_run(25), metrics={BYTES: 1000.0})
    judged = checked([*runs, untimed], before)
    assert only(judged)[0] == "suspect"
    assert judged.cases[0].moved
    accepted, lines = accept(judged.cases, before, NOW)
    assert accepted.values == {PLACE: {BYTES: 1000.0}}
    assert [line.partition(" (")[0] for line in lines] == [
        "native.ddp data=2: communication.calls_per_step 3 -> -",
        "native.ddp data=2: accepted_time smoke-25",
    ]
    assert only(checked([*runs, untimed], accepted)) == ("ok", "")


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
    """Until then it is suspect."""
    before = Accepted(values={PLACE: {BYTES: 1000.0, "loss": 3.0, "loss.after_4_steps": 2.5}})
    judged = checked([case_run(0, precision="fp64", parity_steps=5, metrics={"loss": 2.25})], before)
    verdict, why = only(judged)
    assert (verdict, judged.is_red) == ("suspect", False)
    assert "fp64 loss: accepted after 4 steps, measured after 5: `meshmark accept`" in why
    assert any(note.startswith("1 with exact figures that nothing is held against yet") for note in judged.notes)
    accepted, lines = accept(judged.cases, before, NOW)
    assert accepted.values == {PLACE: {BYTES: 1000.0, "loss.after_5_steps": 2.25}}
    assert lines == [
        "native.ddp data=2: loss 3 -> -",
        "native.ddp data=2: loss.after_4_steps 2.5 -> -",
        "native.ddp data=2: loss.after_5_steps - -> 2.25",
    ]


def test_a_case_that_failed_cannot_be_accepted() -> None:
    judged = checked([*nights([1.0] * 25), case_run(25, status="parity failed", metrics={BYTES: 1.0})])
    assert accept(judged.cases, ACCEPTED, NOW) == (ACCEPTED, [])
