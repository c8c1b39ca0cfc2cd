"""torch's DistributedDataParallel as its best users run it: gradients as views of the buckets, a fused optimizer, no
exchange on micro-batches before the last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import traffic
from harness.evaluation import evaluating, sum_losses
from harness.implementation import EvaluationOutput, Implementation, Preparation, StepOutput, as_it_is, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer
from harness.parameters import (
    LogicalParameter,
    MemoryCategory,
    all_reduce_wire_bytes,
    broadcast_wire_bytes,
    replicated_state_bytes,
)
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, Workload
from impls.torch.parts.first_ranks_buffers import broadcast_buffers


class TorchDataParallel(Implementation):
    """DDP averages over ranks, so each rank's loss is multiplied by their number; the divisor is the global token count
    all the same. `bucket_cap_mb` is DDP's own; `find_unused_parameters` makes it search the graph for parameters that
    a step does not reach; by default where the workload says that there are any, since without it DDP then fails.

    Micro-batches before the last one, which exchange nothing, leave gradients beside the buckets: until the last one
    has moved them there, gradients take twice their memory.
    """

    strategy = "data_parallel"

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.tensor, layout.pipeline) != (1, 1) or layout.shard not in (None, 1):
            return f"DistributedDataParallel takes only a data degree, got {layout}"
        if workload.synchronise_batch_norm and device.type == "cpu":
            return "torch.nn.SyncBatchNorm runs on accelerators only"
        if workload.precision.gradient != workload.precision.compute:
            return (
                f"DistributedDataParallel reduces gradients in the parameters' dtype, "
                f"got {workload.precision.name} with gradients in {workload.precision.gradient}"
            )
        return workload.fits_data_degree(layout.data)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)

    @classmethod
    def dry_run_preparation(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Preparation:
        return _with_gradients_twice if workload.training.num_micro_batches > 1 else as_it_is

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        """A ring's 2(n-1)/n of the gradient bytes, and of an int32 a parameter where it searches for unused ones; then
        what the first rank sends of its buffers."""
        summed = replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)["gradients"]
        if _finds_unused(workload, options.get("find_unused_parameters")):
            summed += 4 * sum(parameter.trainable for parameter in parameters)
        return all_reduce_wire_bytes(summed, layout.data) + broadcast_wire_bytes(workload.buffer_bytes(), layout.data)

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        summed = replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)["gradients"]
        (ranks,) = layout.groups("data")
        return traffic.total((traffic.all_reduce(ranks, summed), traffic.tree(ranks, 0, workload.buffer_bytes())))

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool | None = None,
    ) -> None:
        self.workload = workload
        self.device = device
        self.data_degree = layout.data
        self.data_group = mesh.group("data")
        self.module = workload.build_model().to(device)
        if workload.synchronise_batch_norm:
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module, self.data_group)
        self.optimizer = RecipeOptimizer(self.module, workload)
        self.wrapped = DistributedDataParallel(
            self.module,
            process_group=self.data_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=_finds_unused(workload, find_unused_parameters),
            gradient_as_bucket_view=True,
        )

    def train_step(self, batch: Batch) -> StepOutput:
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        self.optimizer.clear_gradients()
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            without_exchange = self.wrapped.no_sync() if index < last else contextlib.nullcontext()
            with without_exchange:
                with phase("forward"):
                    loss = self.workload.loss_sum(self.wrapped, micro_batch)
                with phase("backward"):
                    (loss * (self.data_degree / batch.global_num_tokens)).backward()
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
            broadcast_buffers(self.module.buffers(), self.data_group)  # DDP would when the next step begins
            return sum_losses(batch, partial(self.workload.loss_sum, self.module), self.device)

    def full_gradients(self) -> dict[str, Tensor]:
        return self.optimizer.unclipped_gradients()

    def full_parameters(self) -> dict[str, Tensor]:
        return self.optimizer.full_parameters(self.module)

    def required_gradients(self) -> Mapping[str, nn.Parameter]:
        """DDP's, which else waits for it in the step after."""
        if self.wrapped.find_unused_parameters:
            return {}
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.numel()}

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": self.optimizer.live_gradients(),
            "optimizer_states": self.optimizer.state_tensors(),
        }


def _finds_unused(workload: Workload, asked_for: bool | None) -> bool:
    return workload.leaves_parameters_unused if asked_for is None else asked_for


def _with_gradients_twice(model: nn.Module, gradients: Mapping[str, Tensor]) -> Callable[[Tensor], None]:
    """`gradients` are the buckets' views; the last backward finds others, and moves each as it gets ready."""

    def move(view: Tensor, parameter: Tensor) -> None:
        parameter.grad = view

    def begin_backward(loss: Tensor) -> None:
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.grad = torch.empty_like(parameter)
                parameter.register_post_accumulate_grad_hook(partial(move, gradients[name]))

    return begin_backward
