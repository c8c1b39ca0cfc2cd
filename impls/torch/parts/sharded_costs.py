"""What FSDP2 costs a rank, from its units: bytes of memory by category and bytes sent in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch

from harness.layout import Layout
from harness.parameters import LogicalParameter, MemoryCategory, all_reduce_wire_bytes, broadcast_wire_bytes
from harness.workload import Workload
from impls.torch.parts.sharded_units import Units, padded_elements, reduced_dtype


def memory_bytes(
    units: Units, workload: Workload, parameters: Sequence[LogicalParameter], *, reshards: bool, reduces_each: bool
) -> dict[MemoryCategory, int]:
    """By category, of the first rank. Where there are masters the trained shards *are* the masters, and gradients are
    kept in their dtype. Gradients that wait for the last micro-batch are whole, in the dtype they are summed in."""
    trained = [parameter for parameter in parameters if parameter.trainable]
    num_micro_batches = workload.training.num_micro_batches
    shards = _shard_bytes(trained, workload, units.num_shards)
    whole = sum(parameter.num_elements * reduced_dtype(workload, parameter).itemsize for parameter in trained)
    return {
        "parameters": _shard_bytes(parameters, workload, units.num_shards),
        "gradients": shards if reduces_each or num_micro_batches == 1 else whole,
        "optimizer_states": shards * (2 if workload.training.optimizer == "adamw" else 1),
        "communication_buffers": peak_buffer_bytes(units, reshards=reshards, num_micro_batches=num_micro_batches),
    }


def peak_buffer_bytes(units: Units, *, reshards: bool, num_micro_batches: int) -> int:
    """The most that FSDP's own buffers hold at once, which is when backward has just made a unit's gradients: the unit
    itself, the one gathered ahead of its use, those gradients, and what the unit before put into its reduction.

        backward of unit 1:   gathered 1 + gathered 0 (ahead) + gradients 1 + reduced 2

    The root's parameters and gradients are there all along; without resharding so are the units that backward has yet
    to reach, or all of them where a further micro-batch will need them. Left out are the transport's own copies (gloo
    copies once more what it gathers or reduces, for as long as that takes), shards on their way, and activations.
    """
    gathered = [unit.gathered_bytes for unit in units.blocks]
    if reshards:
        ahead = [0, *gathered][: len(gathered)] if units.num_shards > 1 else [0] * len(gathered)
        alive = [own + next_one for own, next_one in zip(gathered, ahead, strict=True)]
    elif num_micro_batches > 1:
        alive = [sum(gathered)] * len(gathered)
    else:
        alive = list(accumulate(gathered))
    queued = [*(unit.reduced_bytes for unit in units.blocks[1:]), 0]
    peaks = (
        whole + unit.gradient_bytes + reducing
        for whole, unit, reducing in zip(alive, units.blocks, queued, strict=False)  # queued has one even for no block
    )
    return units.root.gathered_bytes + units.root.gradient_bytes + max(peaks, default=0)


def wire_bytes(
    units: Units,
    workload: Workload,
    parameters: Sequence[LogicalParameter],
    layout: Layout,
    *,
    reshards: bool,
    reduces_each: bool,
) -> int:
    """What the first rank sends in a step, on gloo. Of n ranks each sends (n-1)/n of what is gathered and, since a
    reduce-scatter there moves as much as an all-reduce, 2(n-1)/n of what is reduced; then 2(r-1)/r of a shard's
    gradients to sum those of r replicas. Beside that the norms of the shards where the recipe needs the global one, a
    byte a parameter to find out which nobody used, and buffers."""
    num_micro_batches, training = workload.training.num_micro_batches, workload.training
    num_reductions = num_micro_batches if reduces_each else 1
    num_gathers = _num_gathers(units, reshards=reshards, num_micro_batches=num_micro_batches)
    total = broadcast_wire_bytes(workload.buffer_bytes(), layout.data)
    for unit, times in zip((*units.blocks, units.root), num_gathers, strict=True):
        gathered_shard = unit.gathered_bytes // units.num_shards
        reduced_shard = unit.reduced_bytes // units.num_shards
        total += (units.num_shards - 1) * (times * gathered_shard + 2 * num_reductions * reduced_shard)
        total += all_reduce_wire_bytes(reduced_shard, layout.data // units.num_shards)
    if training.checks_norm:
        total += (units.num_shards - 1) * torch.float64.itemsize
    if workload.leaves_parameters_unused:
        total += all_reduce_wire_bytes(sum(parameter.trainable for parameter in parameters), layout.data)
    return total


def _num_gathers(units: Units, *, reshards: bool, num_micro_batches: int) -> Iterator[int]:
    """How often each unit is gathered in a step, the root last. Without resharding once; else for each forward and
    again for backward, except the last block's and the root's, which backward finds whole. Backward gathers one unit
    ahead, and ends with the first that trains anything."""
    trained = [index for index, unit in enumerate(units.blocks) if unit.reduced_bytes]
    end = 0 if units.root.reduced_bytes or not trained else trained[0] - 1
    for index in range(len(units.blocks)):
        again = end <= index < len(units.blocks) - 1
        yield num_micro_batches * (1 + again) if reshards else 1
    yield num_micro_batches if reshards else 1


def _shard_bytes(parameters: Iterable[LogicalParameter], workload: Workload, num_shards: int) -> int:
    """One rank's shards as they are kept between steps."""
    master = workload.precision.master
    return sum(
        padded_elements(p, num_shards) // num_shards * (master if master and p.trainable else p.dtype).itemsize
        for p in parameters
    )
