"""One process, the whole global batch: the truth that every other implementation is held against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


class Reference(Implementation):
    """Plain training in one process.

    Where a sample's result depends on which samples share its micro-batch (local BatchNorm, dropout), `data_degree`
    replays the shares of that many data ranks one after another, each with the buffers it would have: rank 0's win.
    """

    strategy = "single"
    makes_gradients = True

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if layout.world_size != 1:
            return f"the reference is one process, got layout {layout} of {layout.world_size} ranks"
        return None

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        return 0

    def __init__(
        self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device, *, data_degree: int = 1
    ) -> None:
        self.workload = workload
        self.device = device
        self.module = workload.build_model().to(device)
        self.data_degree = data_degree
        self.optimizer = RecipeOptimizer(self.module, workload)
        if workload.precision.master is not None:
            for parameter in self.optimizer.parameters:
                parameter.grad_dtype = workload.precision.gradient

    def train_step(self, batch: Batch) -> StepOutput:
        self.optimizer.clear_gradients()
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        starting_buffers = self.full_buffers() if self.data_degree > 1 else {}
        winning_buffers: dict[str, Tensor] = {}
        for data_rank in range(self.data_degree):
            share = batch
            if self.data_degree > 1:
                share = self.workload.batch(batch.step, data_rank=data_rank, data_degree=self.data_degree)
                self._set_buffers(starting_buffers)
            for micro_batch in share.micro_batches:
                with phase("forward"):
                    loss = self.workload.loss_sum(self.module, micro_batch)
                with phase("backward"):
                    (loss / batch.global_num_tokens).backward()
                loss_sum += loss.detach()
                num_tokens += micro_batch.num_tokens
            if data_rank == 0 and self.data_degree > 1:
                winning_buffers = self.full_buffers()
        self._set_buffers(winning_buffers)
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
        # In evaluation mode no sample's result depends on its neighbours: there are no shares to replay.
        with evaluating(self.module):
            return sum_losses(batch, partial(self.workload.loss_sum, self.module), self.device)

    def full_gradients(self) -> dict[str, Tensor]:
        return self.optimizer.unclipped_gradients()

    def full_parameters(self) -> dict[str, Tensor]:
        return self.optimizer.full_parameters(self.module)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return self.optimizer.full_state()

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": self.optimizer.live_gradients(),
            "optimizer_states": self.optimizer.state_tensors(),
        }

    def _set_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in self.module.named_buffers():
            if name in values:
                buffer.copy_(values[name])
