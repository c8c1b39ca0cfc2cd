"""All memory of one rank under a sharded optimizer, laid out from a ZeroPlan: flats of parameters and how they become
whole, flats of gradients and how their shards are summed, and the logical tensors made whole again for whoever asks
between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.mesh import Mesh
from harness.optimizer import norm_over_ranks
from harness.parameters import MemoryCategory
from harness.workload import Workload
from impls.native.parts import flat_memory
from impls.native.parts.buckets import Segment, view_like
from impls.native.parts.gradient_shards import GradientShards, ProcessGroupShards, Then
from impls.native.parts.hierarchical_exchange import HierarchicalGathers, HierarchicalShards
from impls.native.parts.hierarchy import Levels, levels
from impls.native.parts.parameter_gathers import ParameterGathers, ProcessGroupGathers
from impls.native.parts.sharded_bucket import ShardedBucket
from impls.native.parts.shared_gradients import SharedMemoryShards
from impls.native.parts.shared_memory import TIMEOUT_SECONDS, Transport
from impls.native.parts.shared_parameters import ParametersInPlace, SharedMemoryGathers
from impls.native.parts.unit_gathers import PlacedParameter, PlacedUnit
from impls.native.parts.zero_costs import gradient_flats, parameter_flats
from impls.native.parts.zero_plan import PlannedFlat, ZeroPlan

_GATHERS, _GRADIENTS, _NORMS = 0, 1, 2  # lanes: neither kind of collective waits for its turn among the others


class ShardedMemory:
    """Takes the parameters of `module` over: under stages 1 and 2 they become views of the flats, under stage 3 this
    rank keeps its shards alone. `buckets` are the trained flats, in the plan's order."""

    def __init__(
        self,
        plan: ZeroPlan,
        module: nn.Module,
        workload: Workload,
        mesh: Mesh,
        *,
        transport: Transport,
        is_hierarchical: bool,
        whose: str,
    ) -> None:
        self._plan, self._whose = plan, whose
        self._workload = workload
        self._group = mesh.group("shard", lane=_NORMS)
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        self._device = mesh.device
        self.transport = transport
        self._is_hierarchical = is_hierarchical
        self.levels: Levels | None = None
        parameters = dict(module.named_parameters())
        self._templates = {name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()}
        self._parameters = parameters
        self.gathers = self._make_gathers(mesh)
        self.exchange = self._make_exchange(mesh)
        self._fill(parameters)
        self.buckets = [self._bucket(index, flat) for index, flat in enumerate(plan.flats[: plan.num_trained])]
        self._pointers: dict[str, int] = {}
        self.exchange.rest()
        self.begin_step()

    def begin_step(self) -> None:
        """Sums are lent their memory from when they are made, as backward frees activations, to the next step."""
        if self._plan.stage > 1:
            for bucket in self.buckets:
                flat_memory.give_back(bucket.shard_gradients)

    def start_sum(self, index: int, *, add: bool, then: Then | None = None) -> None:
        """This rank's gradients of the bucket are there; see GradientShards."""
        if self._plan.stage > 1:
            flat_memory.take(self.buckets[index].shard_gradients, "gradients")
        self.exchange.start(index, self.buckets[index].shard_gradients, add=add, then=then)

    def begin_update(self) -> None:
        """Backward has ended on this rank. Returns once it may write to its shards of the parameters."""
        self.gathers.begin_update(self.exchange.progress)

    def publish(self, index: int) -> None:
        """This rank has updated its shard of the bucket. Where every rank holds all parameters they become whole from
        here on."""
        self.gathers.publish(index)
        if not self._plan.shards_parameters:
            self.gathers.start(index)

    def finish_update(self) -> None:
        """Returns once the parameters are as the next forward needs them."""
        if not self._plan.shards_parameters:
            for index in range(len(self.buckets)):
                self.gathers.wait(index)

    def placed_units(self, module: nn.Module) -> list[PlacedUnit]:
        """The units of stage 3 on this rank."""
        modules = dict(module.named_modules())
        units = []
        for unit, name in enumerate(self._plan.modules):
            flats = tuple(index for index, flat in enumerate(self._plan.flats) if flat.unit == unit)
            places = tuple(
                PlacedParameter(
                    segment.parameter.name,
                    self._parameters[segment.parameter.name],
                    self._view(self.gathers.full(index), segment),
                )
                for index in flats
                for segment in self._plan.flats[index].plan.bucket.segments
            )
            units.append(
                PlacedUnit(
                    module=None if name is None else modules[name],
                    name=name or "the root unit",
                    slot=self._plan.slot_of_unit(unit),
                    flats=flats,
                    places=places,
                )
            )
        return units

    def norm_over_shards(self, own: Tensor) -> Tensor:
        """The root of the sum of squares of the ranks' `own` norms, fp64 scalars; the same bits on all ranks."""
        return norm_over_ranks(own.to(self._device), self._group)

    def whole(self, index: int, shard: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter of the flat by name, with what the ranks' shards (num_shard_elements,) say of it, on the CPU.
        Collective; not for timed code."""
        shards = [torch.empty_like(shard) for _ in range(self._num_ranks)]
        dist.all_gather(shards, shard.contiguous(), group=self._group)
        full = torch.cat(shards).cpu()
        for segment in self._plan.flats[index].plan.bucket.segments:
            yield segment.parameter.name, self._view(full, segment).clone()

    def unused_everywhere(self) -> set[str]:
        """Parameters that no rank used in the last step. Collective; not for timed code."""
        of_ranks: list[set[str]] = [set()] * self._num_ranks
        own = {name for bucket in self.buckets for name in bucket.unused}
        dist.all_gather_object(of_ranks, own, group=self._group)
        empty = {name for name, template in self._templates.items() if not template.numel()}
        return set.union(*of_ranks) - empty | (set.intersection(*of_ranks) & empty)

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter, whole, by name, on the CPU; the masters where there are any. Collective."""
        full: dict[str, Tensor] = {}
        for index, flat in enumerate(self._plan.flats):
            has_masters = flat.trainable and self.buckets[index].optimizer.has_masters
            own = self.buckets[index].optimizer.master if has_masters else self.gathers.shard(index)
            full |= dict(self.whole(index, self._padded(index, own)))
        for name, parameter in self._parameters.items():
            if name not in full:
                full[name] = parameter.detach().cpu().clone()
        return full

    def full_states(self, kind: str) -> dict[str, Tensor]:
        """One of the optimizer's `flat_states` of every parameter that it steps, whole, by name, on the CPU.
        Collective."""
        full: dict[str, Tensor] = {}
        for index, bucket in enumerate(self.buckets):
            full |= dict(self.whole(index, self._padded(index, bucket.optimizer.flat_states()[kind])))
        return full

    def remember_parameters(self) -> None:
        """Everything lies where it will lie between steps."""
        self._pointers = {name: parameter.data_ptr() for name, parameter in self._parameters.items()}

    def check_parameters(self, module: nn.Module) -> None:
        """Between steps. A parameter put in the place of one taken over would train on its own, or not at all, in
        silence."""
        current = dict(module.named_parameters())
        for name, parameter in self._parameters.items():
            moved = parameter.numel() and parameter.data_ptr() != self._pointers[name]
            if current.get(name) is not parameter or moved:
                raise RuntimeError(
                    f"parameter {name} was replaced after {self._whose} took it over: it is no longer the tensor that "
                    f"is gathered and stepped"
                )

    def tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        """What this rank holds between steps, by category."""
        plan, buckets = self._plan, self.buckets
        # Under stage 1 the gradients lie in the exchange's slots; a storage counts under the category that comes first.
        gradients = [bucket.gradients if plan.stage == 1 else bucket.shard_gradients for bucket in buckets]
        parameters = [self.gathers.shard(index) for index in range(len(plan.flats))]
        if not plan.shards_parameters:
            parameters = [*self._parameters.values(), *(self.gathers.full(i) for i in range(len(plan.flats)))]
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer_states": [tensor for bucket in buckets for tensor in bucket.optimizer.state_tensors()],
            "communication_buffers": [*self.exchange.buffers(), *self.gathers.buffers()],
        }

    def close(self) -> None:
        self.exchange.close()
        self.gathers.close()

    def _make_gathers(self, mesh: Mesh) -> ParameterGathers:
        flats = parameter_flats(self._plan)
        group = mesh.group("shard", lane=_GATHERS)
        if self.transport == "shared_memory":
            kind = ParametersInPlace if self._plan.shards_parameters else SharedMemoryGathers
            return kind(flats, group, timeout_seconds=TIMEOUT_SECONDS, observer=mesh.observer)
        keeps_full = not self._plan.shards_parameters
        if self._is_hierarchical:
            self.levels = levels(mesh, "shard")
            return HierarchicalGathers(flats, group, self.levels, self._device, keeps_full=keeps_full)
        return ProcessGroupGathers(flats, group, self._device, keeps_full=keeps_full)

    def _make_exchange(self, mesh: Mesh) -> GradientShards:
        flats = gradient_flats(self._plan, self._workload)
        group = mesh.group("shard", lane=_GRADIENTS)
        if self.transport == "shared_memory":
            return SharedMemoryShards(flats, group, timeout_seconds=TIMEOUT_SECONDS, observer=mesh.observer)
        if self._is_hierarchical:
            return HierarchicalShards(flats, group, levels(mesh, "shard"), self._device, observer=mesh.observer)
        return ProcessGroupShards(flats, group, self._device, observer=mesh.observer)

    def _fill(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """From the module's parameters to the flats'."""
        with torch.no_grad():
            for index, flat in enumerate(self._plan.flats):
                full = self.gathers.full(index)
                if self._plan.shards_parameters:
                    full = torch.zeros_like(full)  # what the gathers lend may be everybody's
                for segment in flat.plan.bucket.segments:
                    parameter = parameters[segment.parameter.name]
                    view = self._view(full, segment)
                    view.copy_(parameter)
                    if not self._plan.shards_parameters:
                        parameter.data = view
                size = flat.plan.num_shard_elements
                if self._plan.shards_parameters:
                    self.gathers.shard(index).copy_(full[self._rank * size : (self._rank + 1) * size])
                    for segment in flat.plan.bucket.segments:
                        parameters[segment.parameter.name].data = torch.empty(0, dtype=full.dtype, device=full.device)
                self.gathers.publish(index)

    def _bucket(self, index: int, flat: PlannedFlat) -> ShardedBucket:
        gradients, size = self.exchange.own(index), flat.plan.num_shard_elements
        shard = gradients[self._rank * size : (self._rank + 1) * size]
        if self._plan.stage > 1:
            shard = flat_memory.lent(size, gradients.dtype, self._device)
        return ShardedBucket(
            flat.plan,
            self._rank,
            gradients=gradients,
            shard_gradients=shard,
            shard_parameters=self.gathers.shard(index),
            templates=self._templates,
            workload=self._workload,
        )

    def _padded(self, index: int, own: Tensor) -> Tensor:
        """What belongs to this rank's part of the flat, at the size that all ranks' shards have."""
        shard = own.new_zeros(self._plan.flats[index].plan.num_shard_elements)
        shard[: own.numel()] = own
        return shard

    def _view(self, full: Tensor, segment: Segment) -> Tensor:
        return view_like(full, segment, self._templates[segment.parameter.name])
