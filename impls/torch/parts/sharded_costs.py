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
        "optimizer_states": shards * workload.training.num_moments,
        "communication_buffers": peak_buffer_bytes(units, reshards=reshards, num_micro_batches=num_micro_batches),
    }


def peak_buffer_bytes(units: Units, *, reshards: bool, num_micro_batches: int) -> int:
    """The most that FSDP's own buffers hold at once, beside the shards: in forward when a unit has just been copied out
    of what was received, in backward when the last of its gradients has just been made, or when these have just been
    copied together for their sum.

        forward of unit 1    whole 1 + received 1 + received 0
        backward of unit 1   whole 1 + received 0 (ahead of its use) + gradients 1 + what unit 2 has put into its sum
        sum of unit 1                  received 0                    + gradients 1 + what unit 1 puts into its sum

    Without resharding all units before are whole as well, and where a further micro-batch follows all there are. The
    root is whole all along. Left out are the transport's own copies (gloo copies once more what it gathers or reduces,
    for as long as that takes), shards on their way from one dtype to another, and activations.
    """
    blocks, root = units.blocks, units.root
    received = [unit.gathered_bytes * (units.num_shards > 1) for unit in (root, *blocks)]
    so_far = list(accumulate(unit.gathered_bytes for unit in blocks))
    put_in = [*(unit.reduced_bytes for unit in blocks), 0]
    peaks = [received[0], root.gradient_bytes]
    for index, unit in enumerate(blocks):
        in_forward = unit.gathered_bytes if reshards else so_far[index]
        peaks.append(in_forward + received[index + 1] + received[index])
        in_backward, freed = so_far[index], unit.gathered_bytes
        if reshards:
            in_backward = unit.gathered_bytes + (received[index] if index else 0)
        elif num_micro_batches > 1:
            in_backward, freed = so_far[-1], 0
        before_sum, in_sum = in_backward + put_in[index + 1], in_backward - freed + put_in[index]
        peaks.append(max(before_sum, in_sum) + unit.gradient_bytes + root.gradient_bytes)
    return root.gathered_bytes + max(peaks)


def wire_bytes(
    units: Units,
    workload: Workload,
    parameters: Sequence[LogicalParameter],
    layout: Layout,
    *,
    reshards: bool,
    reduces_each: bool,
) -> int:
    """What the first rank sends in a step, on gloo: what is exchanged of parameters and gradients; beside that the
    norms of the shards where the recipe needs the global one, a byte a parameter to find out which nobody used, and
    buffers."""
    total = broadcast_wire_bytes(workload.buffer_bytes(), layout.data)
    total += exchanged_bytes(units, workload, layout.data, reshards=reshards, reduces_each=reduces_each)
    if workload.training.checks_norm:
        total += (units.num_shards - 1) * torch.float64.itemsize
    if workload.leaves_parameters_unused:
        total += all_reduce_wire_bytes(sum(parameter.trainable for parameter in parameters), layout.data)
    return total


def exchanged_bytes(units: Units, workload: Workload, data_degree: int, *, reshards: bool, reduces_each: bool) -> int:
    """Of n ranks each sends (n-1)/n of what is gathered and, since a reduce-scatter on gloo moves as much as an
    all-reduce, 2(n-1)/n of what is reduced; then 2(r-1)/r of a shard's gradients to sum those of r replicas."""
    num_micro_batches = workload.training.num_micro_batches
    num_reductions = num_micro_batches if reduces_each else 1
    num_gathers = _num_gathers(units, reshards=reshards, num_micro_batches=num_micro_batches)
    total = 0
    for unit, times in zip((*units.blocks, units.root), num_gathers, strict=True):
        gathered_shard = unit.gathered_bytes // units.num_shards
        reduced_shard = unit.reduced_bytes // units.num_shards
        total += (units.num_shards - 1) * (times * gathered_shard + 2 * num_reductions * reduced_shard)
        total += all_reduce_wire_bytes(reduced_shard, data_degree // units.num_shards)
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
