"""torch's ZeroRedundancyOptimizer over DistributedDataParallel as its best users run it: gradients as views of DDP's
buckets, parameters as views of one buffer an owner, a fused optimizer (ZeRO stage 1: Rajbhandari et al. 2020, "ZeRO").

    owner      0          1          2        whole parameters, dealt out largest first to whoever has least
    buffer  | a d g |  | b e |   | c f h |    each rank holds all three: gradients are all-reduced by DDP,
    states  | a d g |  | b e |   | c f h |    each owner updates its own, then broadcasts it to the others
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from harness import traffic
from harness.evaluation import evaluating, sum_losses
from harness.implementation import EvaluationOutput, Implementation, Preparation, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer, torch_optimizer
from harness.parameters import (
    LogicalParameter,
    MemoryCategory,
    all_reduce_wire_bytes,
    logical_parameters,
    replicated_state_bytes,
)
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, Workload
from impls.torch.ddp import TorchDataParallel
from impls.torch.parts.first_ranks_buffers import broadcast_buffers

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

_STAND_IN_BYTES = torch.float32.itemsize
"""The owner of no element broadcasts a buffer of one fp32 number all the same."""


class TorchZero(Implementation):
    """Moments are sharded, nothing else: gradients are whole on every rank, and so are the fp32 masters in mixed
    precision, since what an owner steps is what it broadcasts. `bucket_cap_mb` is DDP's own;
    `parameters_as_bucket_view=False` broadcasts each parameter on its own.

    torch can also overlap the update with backward (`overlap_with_ddp`); that trains something else: it takes a single
    decay group and makes no update in its first steps.
    """

    strategy = "zero_1"

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.tensor, layout.pipeline) != (1, 1) or layout.shard not in (None, layout.data):
            return f"ZeroRedundancyOptimizer takes a data degree and shards over all of it, got {layout}"
        dtypes = _dtypes_of_fixed(workload)
        if len(dtypes) > 1:
            return f"ZeroRedundancyOptimizer takes parameters of one dtype, got {', '.join(dtypes)}"
        return TorchDataParallel.unsupported(workload, Layout(data=layout.data), device, {})

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        """The states of the rank that owns most elements, beside the masters of all parameters."""
        precision, num_moments = workload.precision, workload.training.num_moments
        shares = _shares(parameters, layout.data)
        largest = max(shares, key=_num_elements)
        states = replicated_state_bytes(largest, precision, num_moments)["optimizer_states"]
        if precision.master is not None:
            states += precision.master.itemsize * (sum(map(_num_elements, shares)) - _num_elements(largest))
        return {**replicated_state_bytes(parameters, precision, num_moments), "optimizer_states": states}

    @classmethod
    def dry_run_preparation(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Preparation:
        return TorchDataParallel.dry_run_preparation(workload, parameters, layout, {})

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        """DDP's all-reduce of the gradients (and of an int32 a parameter where it searches for unused ones), which is
        the same for all ranks; then what the busiest rank sends, and passes on for others, of the owners' parameters
        and of the first rank's buffers."""
        ranks = layout.data
        summed = replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)["gradients"]
        if workload.leaves_parameters_unused:
            summed += 4 * sum(parameter.trainable for parameter in parameters)
        sent_by_owners = [_broadcast_bytes(share, workload, options) for share in _shares(parameters, ranks)]
        busiest = max(
            sum(
                num_bytes * _num_sends((rank - owner) % ranks, ranks)
                for owner, num_bytes in [*enumerate(sent_by_owners), (0, workload.buffer_bytes())]
            )
            for rank in range(ranks)
        )
        return all_reduce_wire_bytes(summed, ranks) + busiest

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
        summed = replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)["gradients"]
        (ranks,) = layout.groups("data")
        shares = _shares(parameters, layout.data)
        owned = (
            traffic.tree(ranks, owner, _broadcast_bytes(share, workload, options)) for owner, share in enumerate(shares)
        )
        buffers = traffic.tree(ranks, 0, workload.buffer_bytes())
        return traffic.total((traffic.all_reduce(ranks, summed), buffers, *owned))

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        bucket_cap_mb: float = 25,
        parameters_as_bucket_view: bool = True,
    ) -> None:
        self.workload = workload
        self.data_degree = layout.data
        self.device = device
        self.module = workload.build_model().to(device)
        self.data_group = group = mesh.group("data")
        if workload.synchronise_batch_norm:
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module, group)
        # Before DDP, which lays its gradients out as the parameters lie then: the buffers change their strides.
        self.optimizer = RecipeOptimizer(
            self.module, workload, partial(_sharded_optimizer, workload, group, parameters_as_bucket_view)
        )
        self.wrapped = DistributedDataParallel(
            self.module,
            process_group=group,
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
            broadcast_buffers(self.module.buffers(), self.data_group)  # DDP would when the next step begins
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
            "optimizer_states": [*self.optimizer.state_tensors(), *self._moments()],
        }

    def _moments(self) -> Iterable[Tensor]:
        """This rank's share of the states; the sharded optimizer itself has none."""
        sharded = cast("ZeroRedundancyOptimizer", self.optimizer.optimizer)
        for state in sharded.optim.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _sharded_optimizer(
    workload: Workload, group: dist.ProcessGroup, parameters_as_bucket_view: bool, groups: list[dict[str, object]]
) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # brings FSDP along: only ranks pay for it

    for decay_group in groups:
        for tensor in decay_group["params"]:  # type: ignore[attr-defined]  # a list of tensors
            # Masters too: what requires no gradient is not in the buffers, so that it would never be broadcast.
            tensor.requires_grad_()
    return ZeroRedundancyOptimizer(
        groups,
        # It calls this with its own share of each group; whatever makes an optimizer of them will do.
        optimizer_class=partial(torch_optimizer, workload.training),  # type: ignore[arg-type]
        process_group=group,
        parameters_as_bucket_view=parameters_as_bucket_view,
    )


def _shares(parameters: Sequence[LogicalParameter], num_ranks: int) -> list[list[LogicalParameter]]:
    """Each rank's trainable parameters as torch deals them out: those that decay, then the others, largest first,
    each to the first of the ranks that have fewest elements so far."""
    shares: list[list[LogicalParameter]] = [[] for _ in range(num_ranks)]
    for decayed in (True, False):
        dealt = [parameter for parameter in parameters if parameter.trainable and parameter.decayed is decayed]
        for parameter in sorted(dealt, key=lambda parameter: parameter.num_elements, reverse=True):
            min(shares, key=_num_elements).append(parameter)
    return shares


def _num_elements(share: Sequence[LogicalParameter]) -> int:
    return sum(parameter.num_elements for parameter in share)


def _broadcast_bytes(share: Sequence[LogicalParameter], workload: Workload, options: Mapping[str, Any]) -> int:
    """What the owner of `share` brings to all others: what it has stepped, the masters where there are any."""
    master = workload.precision.master
    num_bytes = sum(p.num_elements * (master or p.dtype).itemsize for p in share)
    return num_bytes or _STAND_IN_BYTES * options.get("parameters_as_bucket_view", True)


def _num_sends(position: int, num_ranks: int) -> int:
    """How often the rank `position` places after the root sends a broadcast on along gloo's binomial tree: once in each
    round i in which it has the data (position < 2^i) and somebody stands 2^i places after it."""
    return sum(position < 1 << i < num_ranks - position for i in range(num_ranks.bit_length()))


def _dtypes_of_fixed(workload: Workload) -> list[str]:
    """The dtypes of the trainable parameters where the workload keeps those it was built with."""
    if not workload.fixed_dtypes:
        return []  # the model has the one of the precision, or the masters have theirs
    registry = logical_parameters(workload.model_without_memory(), workload.decays)
    return sorted({str(parameter.dtype).removeprefix("torch.") for parameter in registry if parameter.trainable})
