"""A model cut along the tensor axis in torch's own styles, by the workload's tensor plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from harness.parameters import LogicalParameter, logical_parameters
from harness.tensor_plan import ColumnParallel, ResolvedPlan, Role, RowParallel, partial_parameters, resolve
from harness.workload import Workload, cross_entropy_sum


@dataclass(frozen=True, kw_only=True)
class TensorCut:
    """What was cut: the trainable parameters as they were whole, of those that are whole on every rank the names of
    those whose gradients are summands, and of fused layers the order of rows in which each rank's are together.
    `cuts_logits` if the logits stay cut, for loss_parallel."""

    registry: tuple[LogicalParameter, ...]
    partial: frozenset[str]
    fused_rows: dict[str, Tensor]
    cuts_logits: bool

    def in_order(self, name: str, whole: Tensor) -> Tensor:
        """The rows of a parameter that was put together again where they are in the model."""
        if name not in self.fused_rows:
            return whole
        result = torch.empty_like(whole)
        result[self.fused_rows[name]] = whole
        return result


def cut(module: nn.Module, workload: Workload, mesh: DeviceMesh) -> TensorCut:
    """Cuts `module`, on its device, over the one-dimensional `mesh`. Collective."""
    assert workload.tensor_plan is not None
    plan = resolve(module, workload.tensor_plan(module))
    fused = _fused_rows(module, plan, mesh.size())
    for name, order in fused.items():
        parameter = module.get_parameter(name)
        parameter.data = parameter.data[order].contiguous()
    partial = partial_parameters(module, plan)
    registry = tuple(p for p in logical_parameters(module, workload.decays) if p.trainable)
    cuts_logits = workload.loss is cross_entropy_sum
    modules = dict(module.named_modules())
    styles = {name: _style(role, modules[name], cuts_logits) for name, role in plan.roles.items()}
    parallelize_module(module, mesh, styles)
    _tie(module, registry)
    return TensorCut(registry=registry, partial=frozenset(partial), fused_rows=fused, cuts_logits=cuts_logits)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _style(role: Role, module: nn.Module, cuts_logits: bool) -> ParallelStyle:
    if isinstance(role, ColumnParallel):
        return ColwiseParallel()
    if isinstance(role, RowParallel):
        return RowwiseParallel()
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    if cuts_logits:
        return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return ColwiseParallel(output_layouts=Replicate())


def _fused_rows(model: nn.Module, plan: ResolvedPlan, degree: int) -> dict[str, Tensor]:
    """For the parameters of fused layers, by name, the order of rows in which each rank's are together."""
    orders: dict[str, Tensor] = {}
    for name, role in plan.roles.items():
        if isinstance(role, ColumnParallel) and role.parts > 1:
            for kind, parameter in model.get_submodule(name).named_parameters(recurse=False):
                rows = torch.arange(len(parameter)).view(role.parts, degree, -1)
                orders[f"{name}.{kind}"] = rows.transpose(0, 1).flatten()
    return orders


def _tie(model: nn.Module, registry: Sequence[LogicalParameter]) -> None:
    """Makes what was one parameter one again: each layer was given its own."""
    for parameter in registry:
        for alias in parameter.aliases:
            path, _, kind = alias.rpartition(".")
            setattr(model.get_submodule(path), kind, model.get_parameter(parameter.name))
