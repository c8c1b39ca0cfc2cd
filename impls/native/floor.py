"""Compute only: every rank trains on its own share and exchanges nothing. Its ranks drift apart: it is no training, but
the floor under the step time of every strategy that gives a rank the same share of the batch and of the update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.evaluation import evaluating, sum_losses
from harness.implementation import EvaluationOutput, Implementation, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer
from harness.parameters import LogicalParameter, MemoryCategory, replicated_state_bytes
from harness.workload import Batch, Workload
from impls.native.parts.share_of_update import ShareOfUpdate, num_updated


class ComputeFloor(Implementation):
    """Forward, backward and torch's fused update of the local share, with nothing in between: gradients stay where
    autograd makes them. With `shards_update` a rank updates as much as a sharded optimizer leaves it
    (parts/share_of_update.py)."""

    strategy = "compute_only"
    makes_gradients = True

    @classmethod
    def is_floor(cls, options: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.tensor, layout.pipeline) != (1, 1):
            return f"the floor computes the whole model on each rank: it takes only a data degree, got {layout}"
        return workload.fits_data_degree(layout.data)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        moments = workload.training.num_moments
        whole = replicated_state_bytes(parameters, workload.precision, moments)
        if not options.get("shards_update"):
            return whole
        updated = [replace(p, shape=(num_updated(p.num_elements, layout.shard_degree),)) for p in parameters]
        states = replicated_state_bytes(updated, workload.precision, moments)["optimizer_states"]
        return {**whole, "optimizer_states": states}

    def __init__(
        self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device, *, shards_update: bool = False
    ) -> None:
        self.workload = workload
        self.device = device
        self.module = workload.build_model().to(device)
        self.optimizer = RecipeOptimizer(self.module, workload)
        if shards_update:
            self.optimizer = ShareOfUpdate(self.module, workload, layout.shard_degree)

    def train_step(self, batch: Batch) -> StepOutput:
        self.optimizer.clear_gradients()
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for micro_batch in batch.micro_batches:
            with phase("forward"):
                loss = self.workload.loss_sum(self.module, micro_batch)
            with phase("backward"):
                (loss / batch.global_num_tokens).backward()
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        with phase("optimizer"):
            update = self.optimizer.step(tracks_norm=self.tracks_gradient_norm)
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=update.gradient_norm,
            skipped=update.skipped,
            learning_rates=update.learning_rates,
        )

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        with evaluating(self.module):
            return sum_losses(batch, partial(self.workload.loss_sum, self.module), self.device)

    def full_gradients(self) -> dict[str, Tensor]:
        return self.optimizer.unclipped_gradients()

    def full_parameters(self) -> dict[str, Tensor]:
        return self.optimizer.full_parameters(self.module)

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": self.optimizer.live_gradients(),
            "optimizer_states": self.optimizer.state_tensors(),
        }
