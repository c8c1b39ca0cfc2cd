"""What fully_shard cannot train.

It refuses scalars, strides, and mixed dtypes when it is called, and fails in the first backward on gradients that are
empty or sparse. Since it puts parameters of its own in the place of a model's, it loses hooks of those, and misses
whoever holds one beside its module, both in silence; the latter is seen only when the model is there.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from weakref import ref

import torch
from torch import nn

from harness.parameters import has_hooks, logical_parameters
from harness.workload import Workload
from impls.torch.parts.sharded_units import plan_units


def why_not(workload: Workload, blocks_per_group: int) -> str | None:
    """What in the workload's model stands in the way, or None."""
    model = workload.model_without_memory()
    for name, parameter in model.named_parameters():
        if reason := _why_not(parameter):
            return f"fully_shard {reason}: {name} has shape {tuple(parameter.shape)}, strides {parameter.stride()}"
        if has_hooks(parameter):
            return f"fully_shard replaces parameters and loses their hooks: {name} has one"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"fully_shard reduces dense gradients: {name} is an embedding with sparse=True"
    return _mixed_dtypes(workload, blocks_per_group) if workload.fixed_dtypes else None


def refuse_held(originals: Mapping[str, ref[nn.Parameter]]) -> None:
    """ValueError if one of the parameters from before fully_shard lives on: it would be used there, untrained."""
    if any(original() is not None for original in originals.values()):
        gc.collect()
    for name, original in originals.items():
        if original() is not None:
            raise ValueError(f"torch.fsdp: fully_shard replaces parameters, but something else still holds {name}")


def _why_not(parameter: nn.Parameter) -> str | None:
    if parameter.ndim == 0:
        return "cuts parameters along their first dim"
    if not parameter.is_contiguous():
        return "takes contiguous parameters only"
    if parameter.requires_grad and not parameter.numel():
        return "cannot reduce a gradient without elements"
    return None


def _mixed_dtypes(workload: Workload, blocks_per_group: int) -> str | None:
    """Where a unit trains parameters of several dtypes."""
    registry = logical_parameters(workload.model_without_memory(), workload.decays)
    units = plan_units(workload, registry, blocks_per_group, num_shards=1)
    for unit in (*units.blocks, units.root):
        first_of: dict[torch.dtype, str] = {}
        for parameter in unit.parameters:
            if parameter.trainable:
                first_of.setdefault(parameter.dtype, parameter.name)
        if len(first_of) > 1:
            given = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for dtype, name in first_of.items())
            return f"fully_shard reduces a group's gradients in one dtype, got {given}"
    return None
