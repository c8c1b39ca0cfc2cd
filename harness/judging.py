"""Judging one measured case: its trajectory against the reference's, what explains a gap, and the bytes that a node has
sent against those foreseen."""

from __future__ import annotations

from dataclasses import replace

from harness import models, node_bytes
from harness.case import Case
from harness.explanation import explain
from harness.launch.watched import OnProgress
from harness.measured_case import MeasuredCase
from harness.parity import compare
from harness.references import References, lane_of
from harness.result import Parity
from harness.trajectory import Trajectory
from harness.workload import in_precision


def judge(measured: MeasuredCase) -> None:
    """Gives the case its parity, and the status `parity failed` where it parts from the reference; `failed` where it
    was to part and does not; `bytes mismatch` where its nodes have sent other bytes than foreseen. LaunchFailed if the
    reference itself cannot be run."""
    _judge_parity(measured)
    if measured.status == "ok" and (reason := node_bytes.mismatch(measured.metrics)):
        measured.status, measured.reason = "bytes mismatch", reason


def _judge_parity(measured: MeasuredCase) -> None:
    trajectory = measured.trajectory
    if trajectory is None:
        return
    parity = held_against_reference(trajectory, measured.case, measured.references, measured.on_phase)
    if parity.ok and measured.drifted:
        ranks = ", ".join(map(str, measured.drifted))
        reason = f"after the timed steps rank {ranks} no longer holds the bits that the first of its data group holds"
        parity = replace(parity, ok=False, replicas_bit_equal=False, explanation=reason)
    if not parity.ok:
        measured.status, measured.reason = "parity failed", parity.explanation
    elif measured.case.expected == "parity failed":
        measured.status, measured.reason = "failed", "expected to part from the reference, and did not"
    measured.parity = parity
    measured.metrics["parity.num_skipped_steps"] = float(sum(trajectory.skipped))
    measured.samples |= {
        "losses": trajectory.losses,
        "reference_losses": measured.references.trajectory(measured.case).losses,
    }


def held_against_reference(
    trajectory: Trajectory, case: Case, references: References, on_progress: OnProgress | None = None
) -> Parity:
    """The parity of a run of `case`, with what explains a gap."""
    reference = references.trajectory(case, on_progress)
    tolerance = references.tolerance(case, on_progress)
    parity = compare(trajectory, reference, tolerance)
    if parity.ok:
        return parity
    workload = in_precision(models.load(case.workload), lane_of(case.precision), references.weights(case.workload))
    return replace(parity, explanation=explain(trajectory, reference, tolerance, workload, case.layout))
