"""Units of FSDP2: what fully_shard gathers, reduces and frees together, and how large that is.

A unit is a block of the workload, or several in a row; the root unit is all the rest. Every parameter is cut along its
first dim, by torch.chunk: a weight of five rows on three ranks, and on four

    rank 0 | row 0 | row 1 |        rank 0 | row 0 | row 1 |
    rank 1 | row 2 | row 3 |        rank 1 | row 2 | row 3 |
    rank 2 | row 4 |  pad  |        rank 2 | row 4 |  pad  |
                                    rank 3 |  pad  |  pad  |

Padding is stored, gathered and reduced, but neither stepped nor seen by anyone. The first rank holds most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from harness.parameters import LogicalParameter
from harness.workload import Workload


def group_blocks(workload: Workload, model: nn.Module, blocks_per_group: int) -> list[list[nn.Module]]:
    """The blocks of each unit but the root's, in order. Blocks without parameters are left out; so are those that share
    a parameter with another block, or with a module outside of them: it can be in one unit only, the root's."""
    blocks = [block for block in workload.blocks(model) if block is not model and any(True for _ in block.parameters())]
    holders: dict[nn.Parameter, set[int]] = {}
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            holders.setdefault(parameter, set()).add(index)
    inside = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                holders.setdefault(parameter, set()).add(-1)
    own = [block for block in blocks if all(len(holders[parameter]) == 1 for parameter in block.parameters())]
    return [own[first : first + blocks_per_group] for first in range(0, len(own), blocks_per_group)]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The parameters of one unit, frozen ones included, and their bytes. What is gathered and reduced is padded to
    whole shards; `gradient_bytes` is what autograd makes of them."""

    parameters: tuple[LogicalParameter, ...]
    gathered_bytes: int
    gradient_bytes: int
    reduced_bytes: int


@dataclass(frozen=True, kw_only=True)
class Units:
    """A model cut into units for `num_shards` ranks; `blocks` in order of use."""

    blocks: tuple[Unit, ...]
    root: Unit
    num_shards: int


def plan_units(
    workload: Workload, parameters: Sequence[LogicalParameter], blocks_per_group: int, num_shards: int
) -> Units:
    """The units of the workload's model, whose registry `parameters` is, without the memory to hold it."""
    model = workload.model_without_memory()
    by_name = {parameter.name: parameter for parameter in parameters}
    logical = {tensor: by_name[name] for name, tensor in model.named_parameters()}

    def unit(tensors: Iterable[nn.Parameter]) -> Unit:
        held = tuple(logical[tensor] for tensor in tensors)
        trained = [parameter for parameter in held if parameter.trainable]
        return Unit(
            parameters=held,
            gathered_bytes=sum(padded_elements(p, num_shards) * p.dtype.itemsize for p in held),
            gradient_bytes=sum(parameter.num_bytes for parameter in trained),
            reduced_bytes=sum(padded_elements(p, num_shards) * reduced_dtype(workload, p).itemsize for p in trained),
        )

    groups = [
        list(dict.fromkeys(tensor for block in blocks for tensor in block.parameters()))
        for blocks in group_blocks(workload, model, blocks_per_group)
    ]
    grouped = {tensor for group in groups for tensor in group}
    root = unit(tensor for tensor in logical if tensor not in grouped)
    return Units(blocks=tuple(unit(group) for group in groups), root=root, num_shards=num_shards)


def padded_elements(parameter: LogicalParameter, num_shards: int) -> int:
    """Elements of all shards together, padding included."""
    rows = parameter.shape[0] if parameter.shape else 1
    return -(-rows // num_shards) * num_shards * (parameter.num_elements // rows if rows else 0)


def reduced_dtype(workload: Workload, parameter: LogicalParameter) -> torch.dtype:
    """What a gradient is summed in, between ranks and over micro-batches that are not reduced."""
    return workload.precision.gradient if workload.precision.master is not None else parameter.dtype
