"""What ZeRO under DeepSpeed costs a rank: bytes of memory by category and bytes sent in a step, on gloo.

Elements are flattened by decay group and padded to twice the number of ranks (stages 1, 2), or parameter by parameter
to that number (stage 3). A reduce-scatter is an all-reduce on gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from harness.layout import Layout
from harness.parameters import LogicalParameter, MemoryCategory, all_reduce_wire_bytes, replicated_state_bytes
from harness.workload import Workload
from impls.deepspeed.parts.zero_config import bucket_elements, keeps_gathered, keeps_whole_fp32_gradients

_MASTER_BYTES = torch.float32.itemsize
_PERSISTENT_ELEMENTS = 100_000
_PREFETCHED_ELEMENTS = 50_000_000
"""DeepSpeed's own thresholds."""


def memory_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> dict[MemoryCategory, int] | None:
    """Masters are fp32 copies whatever the precision. A bucket is allocated whole, and once more while it is reduced.
    None where optimizer states leave the device, and where stage 3 does not hold all that it gathers."""
    stage, ranks = options.get("stage", 1), layout.data
    precision, num_moments = workload.precision, workload.training.num_moments
    if options.get("offload_optimizer"):
        return None
    states = replicated_state_bytes(parameters, precision, num_moments)
    gradient_bytes, elements = _gradient_bytes(workload), _num_trained(parameters)
    if not stage:
        return {**states, "communication_buffers": elements * gradient_bytes}
    sharded = sum(_padded(group, ranks, stage) for group in _groups(parameters)) // ranks
    masters = sharded * _MASTER_BYTES * (1 + num_moments)
    bucket = bucket_elements(parameters, options) * gradient_bytes
    if stage == 3:
        if elements > _PREFETCHED_ELEMENTS or not keeps_gathered(options):
            return None
        shards = sum(-(-parameter.num_elements // ranks) * parameter.dtype.itemsize for parameter in parameters)
        return {
            "parameters": shards + states["parameters"],
            "gradients": sharded * precision.gradient.itemsize,
            "optimizer_states": masters,
            "communication_buffers": 2 * bucket,
        }
    if keeps_whole_fp32_gradients(workload, options):
        whole = elements * (precision.compute.itemsize + _MASTER_BYTES)
        buffers = elements * gradient_bytes
    else:
        unreduced = max(0, elements * precision.gradient.itemsize - bucket) if stage == 1 else 0
        whole = sharded * precision.gradient.itemsize + unreduced
        buffers = 2 * bucket
    return {
        "parameters": states["parameters"],
        "gradients": whole,
        "optimizer_states": masters,
        "communication_buffers": buffers,
    }


def wire_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> int | None:
    """None where what is sent follows from DeepSpeed's trace of modules, or from who owns a piece of a bucket."""
    stage, ranks = options.get("stage", 1), layout.data
    num_micro_batches = workload.training.num_micro_batches
    summed = _num_trained(parameters) * _gradient_bytes(workload)
    if not stage:
        return all_reduce_wire_bytes(summed, ranks) + _norm_bytes(workload, parameters, layout, options)
    if not options.get("use_multi_rank_bucket_allreduce", True) or options.get("zero_hpz_partition_size", 1) > 1:
        return None
    if stage == 3:
        if keeps_gathered(options) and _num_trained(parameters) > _PREFETCHED_ELEMENTS:
            return None
        sent = num_micro_batches * all_reduce_wire_bytes(_padded_bytes(parameters, ranks, workload), ranks)
        sent += _gathered_bytes(workload, parameters, ranks, options)
    else:
        sent = all_reduce_wire_bytes(summed, ranks) * (num_micro_batches if stage == 2 else 1)
        padded = sum(_padded(group, ranks, stage) for group in _groups(parameters))
        sent += padded * workload.precision.compute.itemsize * (ranks - 1) // ranks
    return sent + _norm_bytes(workload, parameters, layout, options)


def _gathered_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], ranks: int, options: Mapping[str, Any]
) -> int:
    """Small parameters once, after the update; the others for every micro-batch, once more where they do not stay."""
    given = options.get("stage3_param_persistence_threshold")
    threshold = _PERSISTENT_ELEMENTS if given is None else given
    of_others = workload.training.num_micro_batches * (1 if keeps_gathered(options) else 2)
    total = 0
    for parameter in parameters:
        times = 1 if parameter.num_elements <= threshold else of_others
        total += times * (ranks - 1) * -(-parameter.num_elements // ranks) * parameter.dtype.itemsize
    return total


def _norm_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> int:
    """Of one number a decay group, where it is taken, in fp64 in stage 3; and of a flag where bf16 gradients are looked
    through for what is not finite."""
    stage, training = options.get("stage", 1), workload.training
    if not stage:
        clips_by_hand = training.clip_norm is not None and workload.precision.master is None
        return all_reduce_wire_bytes(torch.float32.itemsize, layout.data) if clips_by_hand else 0
    if keeps_whole_fp32_gradients(workload, options):
        return 0  # every rank has the whole gradient
    num_groups = len(list(_groups(parameters)))
    if stage == 3:
        return num_groups * all_reduce_wire_bytes(torch.float64.itemsize, layout.data)
    sent = num_groups * all_reduce_wire_bytes(torch.float32.itemsize, layout.data) if training.checks_norm else 0
    if training.skip_nonfinite and workload.precision.master is not None:
        sent += all_reduce_wire_bytes(torch.uint8.itemsize, layout.data)
    return sent


def _gradient_bytes(workload: Workload) -> int:
    return workload.precision.gradient.itemsize


def _num_trained(parameters: Sequence[LogicalParameter]) -> int:
    return sum(parameter.num_elements for parameter in parameters if parameter.trainable)


def _groups(parameters: Sequence[LogicalParameter]) -> Iterator[list[LogicalParameter]]:
    for decayed in (True, False):
        group = [parameter for parameter in parameters if parameter.trainable and parameter.decayed is decayed]
        if group:
            yield group


def _padded(group: Sequence[LogicalParameter], ranks: int, stage: int) -> int:
    if stage == 3:
        return sum(ranks * -(-parameter.num_elements // ranks) for parameter in group)
    return 2 * ranks * -(-_num_trained(group) // (2 * ranks))


def _padded_bytes(parameters: Sequence[LogicalParameter], ranks: int, workload: Workload) -> int:
    return sum(_padded(group, ranks, 3) for group in _groups(parameters)) * _gradient_bytes(workload)
