"""A step of FSDP2's first rank on tensors without memory: what it holds beside its shards, and when. See
harness.implementation.DryStep.

    forward of unit 1     received 0 | received 1 | whole 1                0 goes when 1 has been copied out
    backward of unit 1    whole 1 | received 0 | put in 2 | gradients 1    0 is gathered ahead of its use
    sum of unit 1         received 0 | put in 1 | gloo's copy | shards 1   put in 1 stays until the sum of unit 0

The moments are those of torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py. Where a unit's inputs need no
gradient its sum comes when all of backward is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from harness.implementation import DryStep, lending, phase
from harness.parameters import LogicalParameter
from harness.tensors_in_use import tensors_in
from harness.workload import Batch, Workload
from impls.torch.parts.sharded_units import Unit, Units, group_blocks, padded_elements, reduced_dtype


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What is gathered together, and the options of TorchFullySharded."""

    units: Units
    num_replicas: int
    blocks_per_group: int
    reshards: bool
    reduces_each: bool


def dry_step(
    workload: Workload, sharding: Sharding, module: nn.Module, *, held_bytes: int, data_degree: int
) -> DryStep:
    """That of the rank which holds `held_bytes` of parameters and optimizer states, most of all, with the samples of
    the last one, which has most. Of more than three micro-batches those between are like the second."""
    batch = workload.batch(0, data_rank=data_degree - 1, data_degree=data_degree)
    taken = (*batch.micro_batches[:2], *batch.micro_batches[2:][-1:])
    step = ShardedStep(workload, sharding, module)
    held = [*module.parameters(), *module.buffers()]
    return DryStep(held_bytes=held_bytes, held=held, batch=replace(batch, micro_batches=taken), take=step.take)


class _LiveUnit:
    """What there is of a unit at the moment."""

    def __init__(
        self, unit: Unit, modules: Sequence[nn.Module], tensors: dict[str, nn.Parameter], *, reshards: bool
    ) -> None:
        self.unit, self.modules, self.reshards = unit, modules, reshards
        in_order = [tensor for module in modules for part in _children_first(module) for tensor in part]
        by_tensor = {tensors[parameter.name]: parameter for parameter in unit.parameters if parameter.trainable}
        self.trained = [(by_tensor[tensor], tensor) for tensor in dict.fromkeys(in_order) if tensor in by_tensor]
        self.state: Literal["idle", "backward", "done"] = "idle"
        self.to_come: set[nn.Module] = set()  # its modules, while they are in forward
        self.places: list[int] = []  # of forwards whose backward is to come, among those of all units
        self.received: Tensor | None = None
        self.whole: list[Tensor] = []
        self.accumulated: dict[str, Tensor] = {}  # whole gradients, where they are summed in another dtype
        self.of_replica: Tensor | None = None  # shards of gradients that wait for the other replicas'
        self.summed: Tensor | None = None  # over replicas, in the dtype of the sum
        self.shards: Tensor | None = None  # of gradients


class ShardedStep:
    """Holds what FSDP2 does while it does, as hooks of `module` tell."""

    def __init__(self, workload: Workload, sharding: Sharding, module: nn.Module) -> None:
        self._workload, self._module, self._sharding = workload, module, sharding
        self._num_shards = sharding.units.num_shards
        self._device = next(module.parameters()).device
        self._order: list[_LiveUnit] = []  # of forwards
        self._received: Tensor | None = None  # of the last forward
        self._put_in: Tensor | None = None  # what the last sum was made of
        self._is_last, self._ends_backward = True, False
        tensors = dict(module.named_parameters())
        groups = group_blocks(workload, module, sharding.blocks_per_group)
        self._root = _LiveUnit(sharding.units.root, [module], tensors, reshards=False)
        self._units = [self._root]
        for index, (unit, modules) in enumerate(zip(sharding.units.blocks, groups, strict=True)):
            reshards = sharding.reshards and index < len(groups) - 1
            self._units.append(_LiveUnit(unit, modules, tensors, reshards=reshards))
        for live in self._units:
            for part in live.modules:
                part.register_forward_pre_hook(partial(self._begin_forward, live), prepend=True, with_kwargs=True)
                part.register_forward_hook(partial(self._end_forward, live))

    def take(self, batch: Batch) -> None:
        """As TorchFullySharded.train_step, without the update."""
        for index, given in enumerate(batch.micro_batches):
            self._is_last = index == len(batch.micro_batches) - 1
            micro_batch = given
            if self._workload.leaves_parameters_unused and given.inputs.is_floating_point():
                micro_batch = replace(given, inputs=given.inputs.detach().requires_grad_())
            with phase("forward"):
                objective = self._workload.loss_sum(self._module, micro_batch) / batch.global_num_tokens
            with phase("backward"):
                objective.backward()

    # In forward.

    def _begin_forward(self, unit: _LiveUnit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit.state == "backward" or unit.to_come:
            return None
        unit.to_come = set(unit.modules)
        self._gather(unit)
        self._copy_out(unit, in_forward=True)
        leaves, structure = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not (places and torch.is_grad_enabled()):
            return None
        given = [leaves[place] for place in places]
        marked = _Marked.apply(partial(self._end_unit, unit), *given)  # type: ignore[no-untyped-call]
        for place, leaf in zip(places, marked, strict=True):
            leaves[place] = leaf
        return tree_unflatten(leaves, structure)

    def _end_forward(self, unit: _LiveUnit, module: nn.Module, args: Any, outputs: Any) -> None:
        unit.to_come.discard(module)
        if unit.to_come or unit.state == "backward":
            return
        if unit.reshards:
            unit.whole.clear()
        if unit.unit.parameters:
            unit.places.append(len(self._order))
            self._order.append(unit)
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, unit))
        if unit is self._root:
            self._received = None

    def _gather(self, unit: _LiveUnit) -> None:
        if unit.whole or unit.received is not None or not unit.unit.parameters or self._num_shards == 1:
            return
        cast = self._memory(
            sum(self._padded_bytes(p) for p in unit.unit.parameters if self._casts(p)) // self._num_shards
        )
        unit.received = self._memory(unit.unit.gathered_bytes)
        if self._device.type == "cpu":
            self._memory(unit.unit.gathered_bytes)  # gloo's copy
        del cast

    def _copy_out(self, unit: _LiveUnit, *, in_forward: bool) -> None:
        if unit.whole or not unit.unit.parameters:
            return
        received, unit.received = unit.received, None
        before = None
        if in_forward:
            before, self._received = self._received, received
        unit.whole = [self._memory(self._padded_bytes(parameter)) for parameter in unit.unit.parameters]
        del before, received

    # In backward.

    def _begin_backward(self, unit: _LiveUnit, gradient: Tensor) -> None:
        if not self._ends_backward:
            self._ends_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        if unit.state == "backward":
            return
        unit.state = "backward"
        self._gather(unit)
        self._copy_out(unit, in_forward=False)
        if unit.places and (place := unit.places.pop()):
            self._gather(self._order[place - 1])

    def _end_unit(self, unit: _LiveUnit) -> None:
        """Backward has the gradient of the unit's inputs, or is over."""
        unit.state = "done"
        for parameter, tensor in unit.trained:
            if parameter.name in unit.accumulated and tensor.grad is not None:
                if self._device.type == "cpu":
                    self._memory(unit.accumulated[parameter.name].nbytes)  # the gradient, cast
                tensor.grad = None
        if self._sharding.reshards or self._is_last:
            unit.whole.clear()
        if self._is_last or self._sharding.reduces_each:
            self._put_in = None
            self._reduce(unit)
            return
        for parameter, tensor in unit.trained:
            dtype = reduced_dtype(self._workload, parameter)
            if tensor.grad is not None and tensor.grad.dtype != dtype:
                unit.accumulated[parameter.name] = self._memory(parameter.num_elements * dtype.itemsize)
                tensor.grad = None

    def _end_backward(self) -> None:
        for unit in self._units:
            if unit.state != "done":
                self._end_unit(unit)
            unit.state, unit.received, unit.summed = "idle", None, None
            unit.places.clear()
        self._order.clear()
        self._put_in, self._ends_backward = None, False

    def _reduce(self, unit: _LiveUnit) -> None:
        gradients: list[Tensor] = []
        copies: list[Tensor] = []  # with padding
        reduced, kept = 0, 0
        for parameter, tensor in unit.trained:
            gradient = unit.accumulated.pop(parameter.name, tensor.grad)
            tensor.grad = None
            if gradient is None and self._workload.leaves_parameters_unused:
                gradient = torch.zeros_like(tensor)
            if gradient is not None:
                gradients.append(gradient)
                padded = padded_elements(parameter, self._num_shards)
                reduced += padded * reduced_dtype(self._workload, parameter).itemsize
                kept += padded * (self._workload.precision.master or parameter.dtype).itemsize // self._num_shards
                if padded != parameter.num_elements and self._device.type == "cpu":
                    copies.append(self._memory(padded * gradient.dtype.itemsize))
            del gradient
        if not gradients:
            return
        put_in = self._memory(reduced)
        last = gradients[-1] if self._num_shards > 1 else None  # which a variable of FSDP2's holds until all is done
        gradients.clear()
        copies.clear()
        summed = self._memory(reduced // self._num_shards)
        if self._num_shards == 1 or self._device.type == "cpu":
            self._memory(reduced)  # gloo's copy; alone FSDP2 divides by one
        self._put_in = put_in
        if self._sharding.num_replicas > 1:
            if not self._is_last:
                unit.of_replica = summed if unit.of_replica is None else unit.of_replica
                return
            unit.summed = summed
        shards = summed if kept == summed.nbytes else self._memory(kept)
        del last
        unit.of_replica = None
        unit.shards = shards if unit.shards is None else unit.shards

    def _casts(self, parameter: LogicalParameter) -> bool:
        return parameter.trainable and self._workload.precision.master is not None

    def _padded_bytes(self, parameter: LogicalParameter) -> int:
        return padded_elements(parameter, self._num_shards) * parameter.dtype.itemsize

    def _memory(self, num_bytes: int) -> Tensor:
        with lending("communication_buffers"):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _children_first(module: nn.Module) -> Iterator[Iterable[nn.Parameter]]:
    """Parameters, module by module, in the order in which FSDP2 reduces them."""
    for child in module.children():
        yield from _children_first(child)
    yield module.parameters(recurse=False)


class _Marked(Function):
    """Tells when all gradients of what passes through it are there."""

    @staticmethod
    def forward(ctx: Any, tell: Any, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.tell = tell
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tell()
        return (None, *gradients)
