"""Compute only: every rank trains on its own share and exchanges nothing. Its ranks drift apart: it is no training, but
the floor under the step time of every strategy that gives a rank the same share of the batch and of the update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.evaluation import evaluating, sum_losses
from harness.implementation import EvaluationOutput, Implementation, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer
from harness.parameters import LogicalParameter, MemoryCategory, replicated_state_bytes
from harness.workload import Batch, Workload


class ComputeFloor(Implementation):
    """Forward, backward and torch's fused update of the local share, with nothing in between: gradients stay where
    autograd makes them. With `shards_update` a rank updates as much as a sharded optimizer leaves it: of each parameter
    the first of as many parts as there are shards."""

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
        updated = [replace(p, shape=(_num_updated(p.num_elements, layout),)) for p in parameters]
        states = replicated_state_bytes(updated, workload.precision, moments)["optimizer_states"]
        return {**whole, "optimizer_states": states}

    def __init__(
        self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device, *, shards_update: bool = False
    ) -> None:
        self.workload = workload
        self.device = device
        self.module = workload.build_model().to(device)
        self._updated: dict[str, tuple[nn.Parameter, Tensor]] = {}
        if shards_update:
            self._updated = {
                name: (parameter, parameter.detach().reshape(-1)[: _num_updated(parameter.numel(), layout)])
                for name, parameter in self.module.named_parameters()
            }
        stepped = {name: part for name, (_, part) in self._updated.items()}
        self.optimizer = RecipeOptimizer(self.module, workload, stepped=stepped or None)

    def train_step(self, batch: Batch) -> StepOutput:
        self.optimizer.clear_gradients()
        for parameter, _ in self._updated.values():
            parameter.grad = None
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for micro_batch in batch.micro_batches:
            with phase("forward"):
                loss = self.workload.loss_sum(self.module, micro_batch)
            with phase("backward"):
                (loss / batch.global_num_tokens).backward()
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        for parameter, part in self._updated.values():
            if parameter.grad is not None:
                part.grad = parameter.grad.reshape(-1)[: len(part)]
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
        """Of what is updated."""
        return self.optimizer.unclipped_gradients()

    def full_parameters(self) -> dict[str, Tensor]:
        if self._updated:
            return {name: p.detach().cpu().clone() for name, p in self.module.named_parameters()}
        return self.optimizer.full_parameters(self.module)

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": [p.grad for p in self.module.parameters() if p.grad is not None],
            "optimizer_states": self.optimizer.state_tensors(),
        }


def _num_updated(num_elements: int, layout: Layout) -> int:
    return -(-num_elements // layout.shard_degree)
