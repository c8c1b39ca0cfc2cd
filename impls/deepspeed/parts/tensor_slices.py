"""A workload's tensor plan as DeepSpeed's AutoTP takes it, and what it has cut, put together again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.tensor_plan import ColumnParallel, RowParallel, partial_parameters, resolve
from harness.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Of a parameter whose `dim` is cut each rank has a piece of each of its `parts`, one after another."""

    dim: int
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class TensorSlices:
    """The layers that AutoTP replaces, each with what its specification says beside the name; how each parameter that
    it cuts is cut, by name; and the parameters whose gradients are summed."""

    layers: Mapping[str, dict[str, Any]]
    slices: Mapping[str, Slice]
    summed: tuple[str, ...]

    @property
    def partition_config(self) -> dict[str, Any]:
        """Its configuration."""
        specs = [{"patterns": [f"{re.escape(name)}\\.weight$"], **spec} for name, spec in self.layers.items()]
        if self.summed:
            patterns = [f"{re.escape(name)}$" for name in self.summed]
            specs.append({"patterns": patterns, "partition_type": "skip", "grad_allreduce": True})
        return {"use_default_specs": False, "layer_specs": specs}

    def whole(self, name: str, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The parameter `name`, or its gradient, of which this rank has `own`, on the CPU. Collective."""
        own = own.detach().cpu()
        if name not in self.slices:
            return own.clone()
        cut = self.slices[name]
        pieces: list[Any] = [None] * group.size()
        dist.all_gather_object(pieces, own, group=group)
        of_parts = zip(*(piece.chunk(cut.parts, cut.dim) for piece in pieces), strict=True)
        return torch.cat([torch.cat(part, cut.dim) for part in of_parts], cut.dim)


def slices_of(model: nn.Module, workload: Workload, *, cuts_head: bool) -> TensorSlices:
    """Embeddings stay whole; so does the head where it shares their weight, and else it is cut by the vocabulary and
    its logits are gathered. Parameters that ranks use on their own slices have their gradients summed."""
    assert workload.tensor_plan is not None
    plan = resolve(model, workload.tensor_plan(model))
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    layers: dict[str, dict[str, Any]] = {}
    slices: dict[str, Slice] = {}
    for name, role in plan.roles.items():
        layer = model.get_submodule(name)
        weight, bias = f"{name}.weight", f"{name}.bias"
        if isinstance(role, RowParallel):
            layers[name] = {"partition_type": "row"}
            slices[weight] = Slice(dim=1)
        elif isinstance(role, ColumnParallel):
            fused = {"shape": [role.parts, -1], "partition_dim": 0} if role.parts > 1 else {}
            layers[name] = {"partition_type": "column", **fused}
            slices |= {weight: Slice(dim=0, parts=role.parts), bias: Slice(dim=0, parts=role.parts)}
        elif cuts_head and isinstance(layer, nn.Linear) and id(layer.weight) not in tied:
            layers[name] = {"partition_type": "column", "gather_output": True}
            slices |= {weight: Slice(dim=0), bias: Slice(dim=0)}
    return TensorSlices(layers=layers, slices=slices, summed=tuple(sorted(partial_parameters(model, plan))))
