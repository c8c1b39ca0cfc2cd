"""Judging one measured case: its trajectory against the reference's, and what explains a gap."""

from __future__ import annotations

from dataclasses import replace

from harness.measured_case import MeasuredCase
from harness.parity import compare


def judge(measured: MeasuredCase) -> None:
    """Gives the case its parity, and the status `parity failed` where it parts from the reference. LaunchFailed if the
    reference itself cannot be run."""
    case, trajectory = measured.case, measured.trajectory
    if trajectory is None:
        return
    measured.on_phase("reference", 0, 1)
    reference = measured.references.trajectory(case, measured.on_phase)
    tolerance = measured.references.tolerance(case, measured.on_phase)
    measured.samples |= {"losses": trajectory.losses, "reference_losses": reference.losses}
    parity = compare(trajectory, reference, tolerance)
    if not parity.ok:
        measured.status = "parity failed"
        measured.reason = parity.explanation
    measured.parity = replace(parity)
    measured.metrics |= {
        "parity.num_skipped_steps": float(sum(trajectory.skipped)),
    }
