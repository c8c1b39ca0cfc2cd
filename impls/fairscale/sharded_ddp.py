"""FairScale's ShardedDataParallel over OSS: each gradient is reduced to the rank that owns the parameter, which steps
and broadcasts it (ZeRO stage 2: Rajbhandari et al. 2020, "ZeRO").

    backward   | d, reduced to 1 | c, reduced to 0 | b, reduced to 1 | a, reduced to 0 |
    update     | each rank its own | broadcast 0 | broadcast 1 |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.evaluation import evaluating, sum_losses
from harness.implementation import EvaluationOutput, Implementation, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer, global_norm, norm_over_ranks
from harness.parameters import LogicalParameter, MemoryCategory, logical_parameters
from harness.token_counts import mean_of_means
from harness.workload import Batch, MicroBatch, Workload
from impls.fairscale.parts import library
from impls.fairscale.parts.first_ranks_buffers import broadcast_buffers
from impls.fairscale.parts.gradient_buckets import Reductions, reductions_of
from impls.fairscale.parts.ownership import broadcast_bytes, memory_bytes, num_elements, owner_bytes, shares_of
from impls.fairscale.parts.sharded_optimizer import moments, owners_by_name, sharded_optimizer, why_not

LossScaling = Literal["global_tokens", "rank_mean"]

_REDUCE_BUFFER_SIZE = 1 << 23


class FairScaleShardedDataParallel(Implementation):
    """`reduce_buffer_size` is ShardedDataParallel's own, in elements: as many of each owner's gradients, the smallest
    first, are reduced in one buffer, which every rank keeps whole; 0 reduces each gradient on its own and keeps it on
    its owner alone. It averages over ranks, so each rank's loss is multiplied by their number.

    `loss_scaling=rank_mean` divides each rank's loss by its own tokens and micro-batches instead of the global count,
    as training code without a view of the other ranks does: right where all have alike.

    `set_to_none=True` clears gradients as torch's optimizers do unless told otherwise. They then lie beside the
    buffers, which are reduced all the same: from the second step on each owner steps its own share.
    """

    strategy = "zero_2"
    libraries = ("fairscale",)

    @classmethod
    def unavailable(cls) -> str | None:
        return library.why_unavailable()

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        if (size := _buffer_size(options)) < 0:
            return f"reduce_buffer_size must be at least 0, got {size}"
        known = get_args(LossScaling)
        if (scaling := options.get("loss_scaling", known[0])) not in known:
            return f"loss_scaling must be one of {', '.join(known)}, got {scaling!r}"
        return None

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if reason := why_not(workload, layout, device, "ShardedDataParallel"):
            return reason
        if workload.precision.master is not None:
            return "ShardedDataParallel reduces the gradients of what its optimizer steps: it keeps no fp32 masters"
        if workload.leaves_parameters_unused:
            return (
                "ShardedDataParallel reduces an unused parameter's gradient as zero, which weight decay then moves, or "
                "waits for it for ever on the ranks that use it"
            )
        return None

    @classmethod
    def other_work(cls, workload: Workload, layout: Layout, options: Mapping[str, Any]) -> str | None:
        found = []
        if options.get("set_to_none"):
            registry = logical_parameters(workload.model_without_memory(), workload.decays)
            if any(_reductions(registry, layout, options).bucketed):
                found.append(
                    "gradients that are cleared to None leave the buffers that are reduced, and are not summed"
                )
        if options.get("loss_scaling") == "rank_mean" and (reason := mean_of_means(workload, layout.data)):
            found.append(reason)
        return "; ".join(found) or None

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        """Gradients of several micro-batches are whole on every rank until the last one has been reduced."""
        whole = memory_bytes(workload, parameters, layout.data)
        if workload.training.num_micro_batches > 1:
            return whole
        reductions = _reductions(parameters, layout, options)
        return {**whole, "gradients": max(map(reductions.gradient_bytes, range(layout.data)))}

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        """Of the busiest rank its part in reductions, in bringing owners' parameters and the first rank's buffers to
        all others, and in the norm where the recipe asks for it."""
        ranks, reductions = layout.data, _reductions(parameters, layout, options)
        roots, buffers = owner_bytes(workload, shares_of(parameters, ranks)), {0: workload.buffer_bytes()}
        norm = (ranks - 1) * torch.float64.itemsize if workload.training.checks_norm else 0
        return norm + max(
            reductions.wire_bytes(rank) + broadcast_bytes(rank, roots, ranks) + broadcast_bytes(rank, buffers, ranks)
            for rank in range(ranks)
        )

    @classmethod
    def beyond_the_textbook(cls, device: torch.device, options: Mapping[str, Any]) -> str | None:
        if device.type != "cpu":
            return None
        return "in gloo's reductions to an owner, and in its broadcasts, ranks pass on what others sent"

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        reduce_buffer_size: int = _REDUCE_BUFFER_SIZE,
        loss_scaling: LossScaling = "global_tokens",
        set_to_none: bool = False,
    ) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel

        options = {"reduce_buffer_size": reduce_buffer_size, "loss_scaling": loss_scaling}
        if reason := self.refused_options(options):
            raise ValueError(f"fairscale.sharded_ddp: {reason}")
        self.workload = workload
        self.data_degree = layout.data
        self.device = device
        self.loss_scaling = loss_scaling
        self.set_to_none = set_to_none
        self.group = mesh.group("data")
        self.module = workload.build_model().to(device)
        if workload.synchronise_batch_norm:
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module, self.group)
        self.optimizer = RecipeOptimizer(self.module, workload, partial(sharded_optimizer, workload, self.group))
        self.wrapped = ShardedDataParallel(
            self.module, self.optimizer.optimizer, process_group=self.group, reduce_buffer_size=reduce_buffer_size
        )
        self.owners = owners_by_name(self.optimizer)

    def train_step(self, batch: Batch) -> StepOutput:
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        if self.optimizer.optimizer is not None:
            self.optimizer.optimizer.zero_grad(set_to_none=self.set_to_none)
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            without_exchange = self.wrapped.no_sync() if index < last else contextlib.nullcontext()
            with without_exchange:
                with phase("forward"):
                    loss = self.workload.loss_sum(self.wrapped, micro_batch)
                with phase("backward"):
                    (loss * self._loss_scale(batch, micro_batch)).backward()
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        with phase("optimizer"):
            update = self.optimizer.step(tracks_norm=self.tracks_gradient_norm, norm_of=self._norm)
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

    def _loss_scale(self, batch: Batch, micro_batch: MicroBatch) -> float:
        """What the mean over ranks of the losses is to be multiplied by."""
        if self.loss_scaling == "rank_mean":
            return 1 / (max(micro_batch.num_tokens, 1) * len(batch.micro_batches))
        return self.data_degree / batch.global_num_tokens

    def _norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Of what each rank owns: what it holds of the others' is no sum."""
        own = [gradient for name, gradient in gradients.items() if self._owns(name)]
        return norm_over_ranks(global_norm(own).to(self.device), self.group)

    def _owns(self, name: str) -> bool:
        return self.owners[name] == dist.get_rank(self.group)

    def full_gradients(self) -> dict[str, Tensor]:
        gradients = self.optimizer.unclipped_gradients()
        whole = {}
        for name, parameter in zip(self.optimizer.names, self.optimizer.parameters, strict=True):
            sent = torch.empty_like(parameter)
            if self._owns(name):
                sent.copy_(gradients[name])
            if sent.numel():
                dist.broadcast(sent, group=self.group, group_src=self.owners[name])
            whole[name] = sent.cpu()
        return whole

    def full_parameters(self) -> dict[str, Tensor]:
        return self.optimizer.full_parameters(self.module)

    def required_gradients(self) -> Mapping[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.numel()}

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": self.optimizer.live_gradients(),
            "optimizer_states": [*self.optimizer.state_tensors(), *moments(self.optimizer.optimizer)],
        }


def _buffer_size(options: Mapping[str, Any]) -> int:
    return int(options.get("reduce_buffer_size", _REDUCE_BUFFER_SIZE))


def _reductions(parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]) -> Reductions:
    return reductions_of(shares_of(parameters, layout.data), num_elements(parameters), _buffer_size(options))
