"""From what the ranks of a parity run answered to one trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.launch.failure import LaunchFailed
from harness.layout import Layout
from harness.trajectory import Trajectory


def assemble(records: Sequence[dict[str, Any]], tensors: Path, layout: Layout) -> Trajectory:
    """`records` are the ranks' answers to the worker's `parity`; `tensors` is the file that rank 0 wrote.

    A loss is the sum over the ranks that hold any, each once (the first tensor rank's), over the global token count.
    ValueError where no rank holds any.
    """
    _refuse_disagreement(records)
    steps = range(len(records[0]["norms"]))
    losses = []
    for step in steps:
        sums = [
            record["loss_sums"][step]
            for rank, record in enumerate(records)
            if record["loss_sums"][step] is not None and layout.coordinates(rank).tensor == 0
        ]
        if not sums:
            raise ValueError(f"step {step}: expected the loss on some rank, every rank answered none")
        losses.append(sum(sums) / records[0]["global_num_tokens"][step])
    evaluations = [
        record["evaluation"]
        for rank, record in enumerate(records)
        if record["evaluation"] is not None and layout.coordinates(rank).tensor == 0
    ]
    full = torch.load(tensors, weights_only=True)
    return Trajectory(
        losses=losses,
        evaluation_loss=_evaluation_loss(evaluations) if evaluations else None,
        gradient_norms=records[0]["norms"],
        gradients=full["gradients"],
        starting_parameters=full["starting_parameters"],
        parameters=full["parameters"],
        buffers=full["buffers"],
        skipped=records[0]["skipped"],
        learning_rates=records[0]["rates"],
        replica_checksums={rank: _held_in_common(record) for rank, record in enumerate(records)},
        replica_groups=layout.groups("data"),
    )


def _evaluation_loss(evaluations: Sequence[dict[str, Any]]) -> float:
    """Over the ranks that hold the loss, the sum of their losses over the count of their targets."""
    held = [evaluation for evaluation in evaluations if evaluation["loss_sum"] is not None]
    if not held:
        raise ValueError("evaluation: expected the loss on some rank, every rank answered none")
    total = sum(evaluation["loss_sum"] for evaluation in held)
    return float(total / sum(evaluation["num_tokens"] for evaluation in held))


def _held_in_common(record: dict[str, Any]) -> list[str]:
    """What replicas must have alike after each step: their tensors' bits, and the norm they tell."""
    return [f"{bits} {norm}" for bits, norm in zip(record["checksums"], record["norms"], strict=True)]


def _refuse_disagreement(records: Sequence[dict[str, Any]]) -> None:
    """LaunchFailed where ranks tell unlike things of what is the same for all."""
    for rank, record in enumerate(records):
        for name in ("skipped", "rates", "global_num_tokens"):
            if record[name] != records[0][name]:
                reason = f"rank {rank} tells {name} {record[name]} where rank 0 tells {records[0][name]}"
                raise LaunchFailed("failed", reason, rank)
