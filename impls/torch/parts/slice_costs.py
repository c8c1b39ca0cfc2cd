"""What parallelize_module costs a rank, alone or with fully_shard over its slices (parts/sharded_slices.py), found by
running the whole model on the meta device: bytes of memory by category and bytes sent in a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness import traffic
from harness.layout import Layout
from harness.parameters import LogicalParameter, MemoryCategory, all_reduce_wire_bytes, logical_parameters
from harness.tensor_plan import ColumnParallel, ResolvedPlan, RowParallel, partial_parameters, resolve
from harness.traffic import Traffic
from harness.workload import Workload, cross_entropy_sum, in_compute_precision
from impls.torch.parts import sharded_costs
from impls.torch.parts.sharded_units import padded_elements, plan_units

_META = torch.device("meta")
_SUMS_OF_LOSS = 3  # largest logit, exponentials, the target's logit: a number a row each


@dataclass(frozen=True, kw_only=True)
class SliceCosts:
    """Of the first tensor rank: its `parameters` as they lie there, of which those in `partial` have summands for
    gradients; and the bytes that it sends of a step's activations."""

    parameters: tuple[LogicalParameter, ...]
    partial: frozenset[str]
    activation_bytes: int


def slice_costs(workload: Workload, layout: Layout) -> SliceCosts | None:
    """Of the data rank that has most samples. None where the model does not run without values."""
    assert workload.tensor_plan is not None
    model = in_compute_precision(workload, workload.model_without_memory())
    workload.checkpoint_activations(model)
    plan = resolve(model, workload.tensor_plan(model))
    sums = _Sums(layout.tensor)
    cuts_logits = workload.loss is cross_entropy_sum
    for name, role in plan.roles.items():
        module = model.get_submodule(name)
        if isinstance(role, RowParallel) or isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, inputs, output: sums.add(output))
        else:
            module.register_forward_pre_hook(sums.of_gradient)
            if not isinstance(role, ColumnParallel):
                module.register_forward_hook(partial(sums.of_logits, cuts_logits=cuts_logits))
    batch = workload.batch(0, data_rank=layout.data - 1, data_degree=layout.data).to(_META)
    try:
        for micro_batch in batch.micro_batches:
            with torch.device(_META):
                workload.loss_sum(model, micro_batch).backward()
    except (NotImplementedError, RuntimeError):  # whatever a model does with tensors that have no values
        return None
    return SliceCosts(
        parameters=_slices(workload, model, plan, layout.tensor),
        partial=frozenset(partial_parameters(model, plan)),
        activation_bytes=sums.sent_bytes,
    )


def memory_bytes(costs: SliceCosts, workload: Workload, layout: Layout) -> dict[MemoryCategory, int]:
    """Of shards of the slices."""
    units = plan_units(workload, costs.parameters, 1, layout.data)
    return sharded_costs.memory_bytes(units, workload, costs.parameters, reshards=True, reduces_each=True)


def wire_bytes(costs: SliceCosts, workload: Workload, layout: Layout) -> int:
    """Along tensor the activations, and once a step the summands of this rank's shards; along data what fully_shard
    gathers and reduces of slices; and a norm of all ranks, where the recipe needs it."""
    norm = (layout.world_size - 1) * torch.float64.itemsize if workload.training.checks_norm else 0
    return _bytes_along_tensor(costs, layout) + _bytes_along_data(costs, workload, layout) + norm


def traffic_of(costs: SliceCosts, workload: Workload, layout: Layout) -> Traffic:
    """The bytes of `wire_bytes` from rank to rank: all around rings; norms left out."""
    of_slices, of_shards = _bytes_along_tensor(costs, layout), _bytes_along_data(costs, workload, layout)
    return traffic.total(
        (
            *(traffic.ring(ranks, of_slices) for ranks in layout.groups("tensor")),
            *(traffic.ring(ranks, of_shards) for ranks in layout.groups("data")),
        )
    )


def _bytes_along_tensor(costs: SliceCosts, layout: Layout) -> int:
    sent = costs.activation_bytes
    for parameter in costs.parameters:
        if parameter.name in costs.partial and parameter.trainable:
            shard = padded_elements(parameter, layout.data) // layout.data * parameter.dtype.itemsize
            sent += all_reduce_wire_bytes(shard, layout.tensor)
    return sent


def _bytes_along_data(costs: SliceCosts, workload: Workload, layout: Layout) -> int:
    if layout.data == 1:
        return 0
    units = plan_units(workload, costs.parameters, 1, layout.data)
    return sharded_costs.exchanged_bytes(units, workload, layout.data, reshards=True, reduces_each=True)


class _Sums:
    """Counts what one of `num_ranks` sends to sum activations, as hooks of the plan's layers. What a checkpoint does
    again is summed again, as far as it goes."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.sent_bytes = 0

    def add(self, tensor: Tensor) -> None:
        self.sent_bytes += all_reduce_wire_bytes(tensor.nbytes, self._num_ranks)

    def of_gradient(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Of what comes in, where it has one: a checkpoint's second forward has no backward."""
        if inputs[0].requires_grad and torch.is_grad_enabled():
            inputs[0].register_hook(self.add)

    def of_logits(self, module: nn.Module, inputs: Any, output: Tensor, *, cuts_logits: bool) -> None:
        """They stay cut, and the loss is summed; or they are gathered."""
        if cuts_logits:
            for _ in range(_SUMS_OF_LOSS):
                self.add(output[..., 0])
        else:
            self.sent_bytes += (self._num_ranks - 1) * -(-output.nbytes // self._num_ranks)


def _slices(workload: Workload, model: nn.Module, plan: ResolvedPlan, degree: int) -> tuple[LogicalParameter, ...]:
    """The registry with the shapes of the first rank's slices, which are the largest."""
    dims: dict[int, int] = {}
    for name, role in plan.roles.items():
        for kind, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if isinstance(role, RowParallel) and kind == "bias":
                continue
            dims[id(parameter)] = int(isinstance(role, RowParallel))
    cut = {name: dims[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in dims}
    return tuple(
        replace(p, shape=_cut(p.shape, cut[p.name], degree)) if p.name in cut else p
        for p in logical_parameters(model, workload.decays)
    )


def _cut(shape: tuple[int, ...], dim: int, degree: int) -> tuple[int, ...]:
    return (*shape[:dim], -(-shape[dim] // degree), *shape[dim + 1 :])
