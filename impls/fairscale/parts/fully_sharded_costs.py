"""What FullyShardedDataParallel costs a rank, in closed form: bytes it holds between steps and bytes it sends in one.

Each of W ranks holds ceil(n / W) elements of a parameter of n, the last ones padded with zeros. In a micro-batch

    a block   is gathered before forward, and again before backward where it does not stay; its gradients are
              reduced and scattered:                               3, or 2 where it stays, times (W-1) ceil(n / W)
    the root  is gathered once and stays until its backward:       2 times (W-1) ceil(n / W)
    frozen    parameters have no gradient to reduce; the root's, once gathered, stay for good

Beside it the first rank's buffers after the update, and the norm where the recipe asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from harness.layout import Layout
from harness.parameters import LogicalParameter, MemoryCategory
from harness.wire_bytes import Algorithm, wire_bytes
from harness.workload import Workload


def block_prefixes(workload: Workload, model: nn.Module) -> list[str]:
    """How the names of the parameters of each block begin that is a unit of its own; all others are the root's."""
    names = {id(module): name for name, module in model.named_modules()}
    return [f"{names[id(block)]}." for block in workload.blocks(model) if block is not model]


def memory_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], num_ranks: int
) -> dict[MemoryCategory, int]:
    """Shards, of any rank; what is gathered comes and goes."""
    trained = sum(_shard_bytes(parameter, num_ranks) for parameter in parameters if parameter.trainable)
    return {
        "parameters": sum(_shard_bytes(parameter, num_ranks) for parameter in parameters),
        "gradients": trained,
        "optimizer_states": trained * workload.training.num_moments,
    }


def sent_bytes(
    workload: Workload,
    parameters: Sequence[LogicalParameter],
    layout: Layout,
    *,
    reshards: bool,
    algorithm: Algorithm = "ring",
) -> int:
    """Of the first rank, in a step whose root has nothing frozen left to gather. `algorithm` is the transport's: a ring
    for NCCL, the one that trains it."""
    ranks = layout.data
    prefixes = tuple(block_prefixes(workload, workload.model_without_memory()))
    of_micro_batch = 0
    for parameter in parameters:
        padded = ranks * _shard_bytes(parameter, ranks)
        is_of_block = parameter.name.startswith(prefixes)
        num_gathers = (2 if reshards else 1) if is_of_block else int(parameter.trainable)
        of_micro_batch += num_gathers * wire_bytes("all_gather", padded, ranks, algorithm)
        if parameter.trainable:
            of_micro_batch += wire_bytes("reduce_scatter", padded, ranks, algorithm)
    sent = workload.training.num_micro_batches * of_micro_batch
    if workload.training.checks_norm:
        sent += (ranks - 1) * torch.float64.itemsize
    return sent + wire_bytes("broadcast", workload.buffer_bytes(), ranks, algorithm)


def _shard_bytes(parameter: LogicalParameter, num_ranks: int) -> int:
    return -(-parameter.num_elements // num_ranks) * parameter.dtype.itemsize
