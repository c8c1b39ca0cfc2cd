"""torch's FSDP2 (fully_shard) as its best users run it (Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully
Sharded Data Parallel"): each rank holds a shard of every parameter, gradient and state, and gathers a unit's parameters
(parts/sharded_units.py) for as long as it computes with them.

    forward    gather 0 | unit 0, free | gather 1 | unit 1, free | gather 2 | unit 2
    backward   gather 1 | unit 2, reduce, free | gather 0 | unit 1, reduce, free | unit 0, reduce, free
    update     each rank its shards
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from harness import traffic
from harness.evaluation import evaluating, sum_losses
from harness.implementation import DryStep, EvaluationOutput, Implementation, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import clip_coefficient, decay_groups, global_norm, norm_over_ranks, torch_optimizer
from harness.parameters import LogicalParameter, MemoryCategory, logical_parameters
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, MicroBatch, Workload
from impls.torch.parts import fsdp_dry_run, sharding_limits
from impls.torch.parts.first_ranks_buffers import broadcast_buffers
from impls.torch.parts.resharding import reshard
from impls.torch.parts.sharded_costs import exchanged_bytes, memory_bytes, wire_bytes
from impls.torch.parts.sharded_units import Units, group_blocks, plan_units
from impls.torch.parts.used_parameters import UsedParameters
from impls.torch.parts.whole_tensors import local, whole


class TorchFullySharded(Implementation):
    """Gathers `blocks_per_group` blocks at a time. `reshard_after_forward=False` keeps them gathered from their first
    forward in a step to their last backward. Each micro-batch's gradients are summed into the shards at once, and
    between replicas (a shard degree below the data degree) with the last one; `reduce_each_micro_batch=False` holds
    them whole on every rank until the last one instead.

    The last block and the root stay gathered after forward in any case: backward begins with them. The optimizer steps
    the local shards, since torch's fused SGD takes no DTensor.

    The peak is foreseen by a step on tensors without memory, in which each unit is gathered, summed and freed when
    FSDP2 does so (parts/fsdp_dry_run.py).
    """

    strategy = "zero_3"

    @classmethod
    def comparable_strategies(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("zero_3",) if options.get("reshard_after_forward", True) else ("zero_3", "zero_2")

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        number = _blocks_per_group(options)
        return f"blocks_per_group must be at least 1, got {number}" if number < 1 else None

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.tensor, layout.pipeline) != (1, 1):
            return f"fully_shard takes a data and a shard degree, got {layout}"
        if workload.synchronise_batch_norm and device.type == "cpu":
            return "torch.nn.SyncBatchNorm runs on accelerators only"
        return sharding_limits.why_not(workload, _blocks_per_group(options)) or workload.fits_data_degree(layout.data)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        """Of the first rank, which holds most."""
        units = _units(workload, parameters, layout, options)
        return memory_bytes(units, workload, parameters, **_kept(options))

    @classmethod
    def dry_steps(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Sequence[Callable[[nn.Module], DryStep]]:
        """One rank's, which has the most shards and the most samples of any."""
        states = cls.predicted_memory(workload, parameters, layout, options) or {}
        sharding = fsdp_dry_run.Sharding(
            units=_units(workload, parameters, layout, options),
            num_replicas=layout.data // layout.shard_degree,
            blocks_per_group=_blocks_per_group(options),
            **_kept(options),
        )
        held_bytes = states.get("parameters", 0) + states.get("optimizer_states", 0)
        return [partial(fsdp_dry_run.dry_step, workload, sharding, held_bytes=held_bytes, data_degree=layout.data)]

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        units = _units(workload, parameters, layout, options)
        return wire_bytes(units, workload, parameters, layout, **_kept(options))

    @classmethod
    def beyond_the_textbook(cls, device: torch.device, options: Mapping[str, Any]) -> str | None:
        return "over gloo a reduce-scatter is an all-reduce of twice the bytes" if device.type == "cpu" else None

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        """What is exchanged of parameters and gradients goes around rings of shards, then of replicas."""
        units = _units(workload, parameters, layout, options)
        among_shards = exchanged_bytes(units, workload, layout.shard_degree, **_kept(options))
        among_replicas = exchanged_bytes(units, workload, layout.data, **_kept(options)) - among_shards
        return traffic.total(
            (
                *(traffic.ring(ranks, among_shards) for ranks in layout.groups("shard")),
                *(traffic.ring(ranks, among_replicas) for ranks in layout.groups("replicate")),
                *(traffic.tree(ranks, 0, workload.buffer_bytes()) for ranks in layout.groups("data")),
            )
        )

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        reshard_after_forward: bool = True,
        blocks_per_group: int = 1,
        reduce_each_micro_batch: bool = True,
    ) -> None:
        if reason := self.refused_options({"blocks_per_group": blocks_per_group}):
            raise ValueError(f"torch.fsdp: {reason}")
        self.workload = workload
        self.device = device
        self.reshards = reshard_after_forward
        self.reduces_each = reduce_each_micro_batch
        self.num_replicas = layout.data // layout.shard_degree
        self.num_updates = 0
        self.data_group, self.shard_group = mesh.group("data"), mesh.group("shard")
        self.module = workload.build_model().to(device)
        if workload.synchronise_batch_norm:
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module, self.data_group)
        registry = [p for p in logical_parameters(self.module, workload.decays) if p.trainable]
        self._shard(_device_mesh(layout, mesh), blocks_per_group)
        named = dict(self.module.named_parameters())
        self.parameters = {parameter.name: named[parameter.name] for parameter in registry}
        self.shards = [local(parameter) for parameter in self.parameters.values()]
        groups = decay_groups(registry, self.shards, workload.training.weight_decay)
        self.optimizer = torch_optimizer(workload.training, groups)
        self._clip_scale: Tensor | None = None
        self._used: UsedParameters | None = None
        if workload.leaves_parameters_unused:
            self._used = UsedParameters(self.sharded, self.parameters, self.data_group)
        places = {
            buffer: (module, name)
            for module in self.module.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
        self._buffers = list(places.values())

    def _shard(self, mesh: DeviceMesh, blocks_per_group: int) -> None:
        policy, precision = MixedPrecisionPolicy(), self.workload.precision
        if precision.master is not None:
            _keep_masters(self.module, precision.master)
            policy = MixedPrecisionPolicy(
                param_dtype=precision.compute, reduce_dtype=precision.gradient, cast_forward_inputs=False
            )
        originals = {name: ref(parameter) for name, parameter in self.module.named_parameters()}
        units = group_blocks(self.workload, self.module, blocks_per_group)
        for index, blocks in enumerate(units):
            fully_shard(
                blocks if len(blocks) > 1 else blocks[0],
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=self.reshards and index < len(units) - 1,
            )
        self.sharded = fully_shard(self.module, mesh=mesh, mp_policy=policy)
        self.num_units = len(units)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                # A plain sum; torch would divide by the number of ranks, or multiply before it sums, which gloo cannot.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        sharding_limits.refuse_held(originals)

    def train_step(self, batch: Batch) -> StepOutput:
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for tensor in (*self.parameters.values(), *self.shards):
            tensor.grad = None
        if self._used is not None:
            self._used.start_step()
        for index, micro_batch in enumerate(batch.micro_batches):
            is_last = index == len(batch.micro_batches) - 1
            self._prepare_backward(is_last=is_last)
            with phase("forward"):
                loss = self._loss_sum(micro_batch)
                objective = loss / batch.global_num_tokens
            with phase("backward"):
                objective.backward()
            if self._used is None and (is_last or (self.reduces_each and self.num_replicas == 1)):
                self._require_gradients()
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        if self._used is not None:
            with phase("reduce"):
                self._used.drop_unused()
        learning_rate = self.workload.training.learning_rate_at(self.num_updates)
        with phase("optimizer"), torch.no_grad():
            norm, skipped = self._step(learning_rate)
        # fully_shard leaves buffers alone.
        broadcast_buffers((module.get_buffer(name) for module, name in self._buffers), self.data_group)
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=norm,
            skipped=skipped,
            learning_rates=(learning_rate,) * len(self.optimizer.param_groups),
        )

    def _prepare_backward(self, *, is_last: bool) -> None:
        """Whether the coming backward reduces to shards, sums those of the replicas, and lets go of parameters."""
        self.sharded.set_requires_gradient_sync(self.reduces_each or is_last)
        self.sharded.set_requires_all_reduce(is_last)
        self.sharded.set_reshard_after_backward(self.reshards or is_last)

    def _loss_sum(self, micro_batch: MicroBatch) -> Tensor:
        if self._used is None:
            return self.workload.loss_sum(self.module, micro_batch)
        loss = self.workload.loss_sum(self.module, self._used.start_forward(micro_batch))
        self._used.end_forward()
        return loss

    def _require_gradients(self) -> None:
        """A parameter that only some ranks use would put their reductions out of step."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise RuntimeError(
                    f"torch.fsdp: {name} has no gradient on this rank: the workload must say "
                    f"leaves_parameters_unused=True"
                )

    def _step(self, learning_rate: float) -> tuple[Tensor | None, bool]:
        training = self.workload.training
        norm, self._clip_scale = None, None
        for shard, parameter in zip(self.shards, self.parameters.values(), strict=True):
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        gradients = [shard.grad for shard in self.shards if shard.grad is not None]
        if training.checks_norm or self.tracks_gradient_norm:
            norm = self._norm_of_all_shards(gradients)
        skipped = training.skip_nonfinite and norm is not None and not bool(torch.isfinite(norm))
        if not skipped:
            if training.clip_norm is not None and norm is not None:
                self._clip_scale = clip_coefficient(norm, training.clip_norm)
                for gradient in gradients:
                    gradient.mul_(self._clip_scale)  # not rounded to the gradient's dtype first
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.num_updates += 1
        return norm, skipped

    def _norm_of_all_shards(self, gradients: Sequence[Tensor]) -> Tensor:
        """The global norm in fp64, of the same bits on every rank."""
        return norm_over_ranks(global_norm(gradients).to(self.device), self.shard_group)

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        with evaluating(self.module):
            output = sum_losses(batch, self._loss_sum, self.device)
        reshard(self.module)
        return output

    def full_gradients(self) -> dict[str, Tensor]:
        scale = 1.0 if self._clip_scale is None else float(self._clip_scale)
        gradients = {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}
        return {name: gradient / scale for name, gradient in whole(gradients, self.shard_group).items()}

    def full_parameters(self) -> dict[str, Tensor]:
        return whole(dict(self.module.named_parameters()), self.shard_group)

    def facts(self) -> Mapping[str, str]:
        return {"num_units": str(self.num_units)}

    def replicated_tensors(self) -> Iterable[Tensor]:
        """The buffers, and the shards where each is all there is."""
        yield from self.module.buffers()
        if dist.get_world_size(self.shard_group) == 1:
            yield from self.shards

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return {
            "parameters": self.module.parameters(),
            "gradients": [p.grad for p in self.parameters.values() if p.grad is not None],
            "optimizer_states": [value for value in states if isinstance(value, Tensor)],
        }


def _blocks_per_group(options: Mapping[str, Any]) -> int:
    return int(options.get("blocks_per_group", 1))


def _units(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> Units:
    return plan_units(workload, parameters, _blocks_per_group(options), layout.shard_degree)


def _kept(options: Mapping[str, Any]) -> dict[str, bool]:
    """What is kept from one pass to another."""
    return {
        "reshards": options.get("reshard_after_forward", True),
        "reduces_each": options.get("reduce_each_micro_batch", True),
    }


def _device_mesh(layout: Layout, mesh: Mesh) -> DeviceMesh:
    """The shard axis, with the replicas as a first dim where there are any. Collective."""
    shards = mesh.group("shard")
    if layout.shard_degree == layout.data:
        return DeviceMesh.from_group(shards, mesh.device.type, mesh_dim_names=("shard",))
    ranks = torch.tensor(layout.groups("shard"))  # (replicas, shards)
    return DeviceMesh.from_group(
        [mesh.group("replicate"), shards], mesh.device.type, mesh=ranks, mesh_dim_names=("replicate", "shard")
    )


def _keep_masters(model: nn.Module, master: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(master)
