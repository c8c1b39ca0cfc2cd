"""Exact figures: one byte too many is red, one fewer asks to be accepted, and no more than the stated is tolerated."""

from __future__ import annotations

import pytest

from harness.regression.exact_figures import exact_findings, exact_values, superseded

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


def test_the_loss_after_another_number_of_steps_is_another_figure() -> None:
    """Once `parity_steps` of the suite had changed, every fp64 case was red."""
    values = exact_values({"loss": 2.25}, "fp64", 5)
    assert values == {"loss.after_5_steps": 2.25}
    for accepted in ({LOSS: 2.5}, {"loss": 2.5}):
        assert exact_findings(values, accepted, 5) == []
    (gone,) = exact_findings({}, {LOSS: 2.5}, 4)
    assert gone.verdict == "suspect", "after as many steps it ought to be there"
    assert superseded("loss.after_5_steps", [BYTES, "loss", LOSS, "loss.after_5_steps"]) == ["loss", LOSS]
    assert superseded(BYTES, [BYTES, "loss"]) == []
