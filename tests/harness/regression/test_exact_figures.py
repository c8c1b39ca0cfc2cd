"""Exact figures: one byte too many is red, one fewer asks to be accepted, and no more than the stated is tolerated."""

from __future__ import annotations

import pytest

from harness.regression.exact_figures import after_other_steps, exact_findings, exact_values

BYTES, CALLS = "communication.bytes_per_step", "communication.calls_per_step"
PEAK, LOSS = "memory.peak_allocated_bytes.max_rank", "loss.after_4_steps"


@pytest.mark.parametrize(
    ("figure", "accepted", "value", "verdict"),
    [
        (BYTES, 169_984.0, 169_984.0, "ok"),
        (BYTES, 169_984.0, 169_985.0, "regressed"),
        (BYTES, 169_984.0, 169_983.0, "improved"),
        (BYTES, 0.0, 1.0, "regressed"),
        (BYTES, 0.0, 0.0, "ok"),
        (CALLS, 3.0, 4.0, "regressed"),
        (PEAK, 1000.0, 1010.0, "ok"),
        (PEAK, 1000.0, 1011.0, "regressed"),
        (PEAK, 1000.0, 989.0, "improved"),
        (LOSS, 2.0, 2.0 + 1e-12, "ok"),
        (LOSS, 2.0, 2.0 + 1e-11, "regressed"),
        (LOSS, 2.0, 2.0 - 1e-11, "regressed"),  # a lower loss is another model, not a better one
    ],
)
def test_verdicts(figure: str, accepted: float, value: float, verdict: str) -> None:
    (finding,) = exact_findings({figure: value}, {figure: accepted}, 4)
    assert (finding.figure, finding.verdict) == (figure, verdict)


def test_the_finding_says_both_values() -> None:
    (finding,) = exact_findings({BYTES: 170_000.0}, {BYTES: 169_984.0}, 4)
    assert finding.text == "bytes a step: 170,000, accepted is 169,984 (+0.01%)"
    assert finding.shift == pytest.approx(16 / 169_984)


def test_what_is_not_measured_any_more_is_suspect() -> None:
    (finding,) = exact_findings({}, {BYTES: 12.0}, 4)
    assert (finding.verdict, finding.text) == ("suspect", "bytes a step: not measured, accepted is 12")


def test_what_nobody_has_accepted_is_not_judged() -> None:
    assert exact_findings({BYTES: 1.0}, {}, 4) == []


def test_losses_are_exact_in_fp64_only() -> None:
    metrics = {BYTES: 1.0, "loss": 2.5, "step.median_seconds": 0.1}
    assert exact_values(metrics, "fp64", 4) == {BYTES: 1.0, LOSS: 2.5}
    assert exact_values(metrics, "fp32", 4) == {BYTES: 1.0}


@pytest.mark.parametrize(
    ("accepted", "values", "text"),
    [
        (LOSS, {"loss.after_5_steps": 2.25}, "accepted after 4 steps, measured after 5: `meshmark accept`"),
        (
            "loss",
            {"loss.after_5_steps": 2.25},
            "accepted after an unknown number of steps, measured after 5: `meshmark accept`",
        ),
        (LOSS, {}, "not measured, accepted after 4 steps is 2.5"),
        ("loss.after_5_steps", {}, "not measured, accepted is 2.5"),
    ],
)
def test_a_loss_that_nothing_is_held_against_is_suspect(accepted: str, values: dict[str, float], text: str) -> None:
    """Neither red, which two numbers of steps cannot be, nor passed over in silence."""
    (finding,) = exact_findings(values, {accepted: 2.5}, 5)
    assert (finding.figure, finding.verdict, finding.text) == (accepted, "suspect", f"fp64 loss: {text}")
    assert finding.is_acceptable


def test_the_loss_after_another_number_of_steps_is_another_figure() -> None:
    assert exact_values({"loss": 2.25}, "fp64", 5) == {"loss.after_5_steps": 2.25}
    (finding,) = exact_findings({LOSS: 2.5}, {LOSS: 2.5, "loss": 3.0, "loss.after_5_steps": 2.25}, 4)
    assert (finding.figure, finding.verdict) == (LOSS, "ok")
    assert after_other_steps("loss.after_5_steps", [BYTES, "loss", LOSS, "loss.after_5_steps"]) == ["loss", LOSS]
    assert after_other_steps(BYTES, [BYTES, "loss"]) == []


def test_an_accepted_figure_of_no_known_name_is_suspect() -> None:
    (finding,) = exact_findings({BYTES: 12.0}, {"communication.byte_per_step": 12.0}, 4)
    assert (finding.verdict, finding.text) == (
        "suspect",
        "communication.byte_per_step: accepted, but no exact figure has that name",
    )
