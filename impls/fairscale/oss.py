"""FairScale's OSS over torch's DistributedDataParallel: gradients are all-reduced, each rank steps the parameters that
it owns and broadcasts them (ZeRO stage 1: Rajbhandari et al. 2020, "ZeRO")."""

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
from harness.parameters import LogicalParameter, MemoryCategory, all_reduce_wire_bytes, replicated_state_bytes
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, Workload
from impls.fairscale.parts import library
from impls.fairscale.parts.first_ranks_buffers import broadcast_buffers
from impls.fairscale.parts.ownership import broadcast_bytes, memory_bytes, owner_bytes, shares_of
from impls.fairscale.parts.sharded_optimizer import moments, sharded_optimizer, why_not


class FairScaleShardedOptimizer(Implementation):
    """Moments are sharded, nothing else; parameters become views of one buffer an owner. `bucket_cap_mb` is DDP's own.

    The recipe clips by its own norm over whole gradients. OSS's own clipping would round the norm to fp32, and leave
    out for good what has no gradient in the first step.
    """

    strategy = "zero_1"
    libraries = ("fairscale",)

    @classmethod
    def unavailable(cls) -> str | None:
        return library.why_unavailable()

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if reason := why_not(workload, layout, device, "OSS"):
            return reason
        if workload.precision.gradient != workload.precision.compute:
            return (
                f"DistributedDataParallel reduces gradients in the parameters' dtype, "
                f"got {workload.precision.name} with gradients in {workload.precision.gradient}"
            )
        return None

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return memory_bytes(workload, parameters, layout.data)

    @classmethod
    def dry_run_preparation(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Preparation:
        return _with_gradients_twice if workload.training.num_micro_batches > 1 else as_it_is

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        """DDP's all-reduce of the gradients (and of an int32 a parameter where it searches for unused ones); then what
        the busiest rank sends of the owners' parameters and of the first rank's buffers."""
        ranks, summed = layout.data, _summed_bytes(workload, parameters)
        roots, buffers = owner_bytes(workload, shares_of(parameters, ranks)), {0: workload.buffer_bytes()}
        return all_reduce_wire_bytes(summed, ranks) + max(
            broadcast_bytes(rank, roots, ranks) + broadcast_bytes(rank, buffers, ranks) for rank in range(ranks)
        )

    @classmethod
    def beyond_the_textbook(cls, device: torch.device, options: Mapping[str, Any]) -> str | None:
        more = ", and in gloo's broadcasts ranks pass on what others sent" if device.type == "cpu" else ""
        return (
            "DistributedDataParallel all-reduces gradients, twice the bytes of a reduce-scatter, and owners broadcast "
            f"parameters besides{more}"
        )

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        """A ring of gradients, then a tree from each owner, and one of the first rank's buffers."""
        owned = owner_bytes(workload, shares_of(parameters, layout.data))
        return traffic.total(
            part
            for ranks in layout.groups("data")
            for part in (
                traffic.all_reduce(ranks, _summed_bytes(workload, parameters)),
                *(traffic.tree(ranks, owner, num_bytes) for owner, num_bytes in enumerate(owned)),
                traffic.tree(ranks, 0, workload.buffer_bytes()),
            )
        )

    def __init__(
        self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device, *, bucket_cap_mb: float = 25
    ) -> None:
        self.workload = workload
        self.data_degree = layout.data
        self.device = device
        self.module = workload.build_model().to(device)
        self.group = mesh.group("data")
        if workload.synchronise_batch_norm:
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module, self.group)
        # Before DDP, which lays its gradients out as the parameters lie then: OSS makes them views of its buffers.
        self.optimizer = RecipeOptimizer(self.module, workload, partial(sharded_optimizer, workload, self.group))
        self.wrapped = DistributedDataParallel(
            self.module,
            process_group=self.group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=workload.leaves_parameters_unused,
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
            broadcast_buffers(self.module.buffers(), self.group)  # the wrapper would when the next step begins
            return sum_losses(batch, partial(self.workload.loss_sum, self.module), self.device)

    def full_gradients(self) -> dict[str, Tensor]:
        return self.optimizer.unclipped_gradients()

    def full_parameters(self) -> dict[str, Tensor]:
        return self.optimizer.full_parameters(self.module)

    def replicated_tensors(self) -> Iterable[Tensor]:
        yield from self.module.parameters()
        yield from self.optimizer.masters

    def required_gradients(self) -> Mapping[str, nn.Parameter]:
        """DDP's, which else waits for it in the step after."""
        if self.wrapped.find_unused_parameters:
            return {}
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.numel()}

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": self.optimizer.live_gradients(),
            "optimizer_states": [*self.optimizer.state_tensors(), *moments(self.optimizer.optimizer)],
        }


def _summed_bytes(workload: Workload, parameters: Sequence[LogicalParameter]) -> int:
    """What DDP sums: gradients, and where it searches for unused parameters an int32 of each."""
    summed = replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)["gradients"]
    if workload.leaves_parameters_unused:
        summed += 4 * sum(parameter.trainable for parameter in parameters)
    return summed


def _with_gradients_twice(model: nn.Module, gradients: Mapping[str, Tensor]) -> Callable[[Tensor], None]:
    """DDP moves the gradients of micro-batches without exchange into its buckets as the last backward makes them."""

    def move(bucket_view: Tensor, parameter: Tensor) -> None:
        parameter.grad = bucket_view

    def find_others(loss: Tensor) -> None:
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.grad = torch.empty_like(parameter)
                parameter.register_post_accumulate_grad_hook(partial(move, gradients[name]))

    return find_others
