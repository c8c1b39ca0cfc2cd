"""What ZeRO under DeepSpeed costs a rank: bytes of memory by category and bytes sent in a step, on gloo.

Elements are flattened by decay group and padded to twice the number of ranks (stages 1, 2), or parameter by parameter
to that number (stage 3). A reduce-scatter is an all-reduce on gloo.

Gradients are those that outlive a backward, in stages 1 and 2 those of which this rank steps a part; buffers are the
buckets. What comes and goes within one, zero_dry_run.py and zero_3_dry_run.py hold as it does: gradients on their way
into a bucket, the copy in which they are summed, parameters that are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from harness import traffic
from harness.layout import Layout
from harness.parameters import LogicalParameter, MemoryCategory, all_reduce_wire_bytes, replicated_state_bytes
from harness.traffic import Traffic
from harness.wire_bytes import wire_bytes as wire_bytes_of
from harness.workload import Workload
from impls.deepspeed.parts.zero_3_dry_run import Gathering
from impls.deepspeed.parts.zero_config import (
    bucket_elements,
    keeps_gathered,
    keeps_whole_fp32_gradients,
    may_leave_out_norm,
    reduces_to_owners,
)
from impls.deepspeed.parts.zero_dry_run import Reduction
from impls.deepspeed.parts.zero_partition import decay_groups_of, padded_elements, partition_of

_MASTER_BYTES = torch.float32.itemsize
_PERSISTENT_ELEMENTS = 100_000
_PREFETCHED_ELEMENTS = 50_000_000
"""DeepSpeed's own thresholds."""


def memory_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> dict[MemoryCategory, int] | None:
    """Masters are fp32 copies whatever the precision. None where optimizer states leave the device, and where stage 3
    does not hold all that it gathers."""
    stage, ranks = options.get("stage", 1), layout.data
    precision, num_moments = workload.precision, workload.training.num_moments
    if why_no_memory(parameters, options):
        return None
    states = replicated_state_bytes(parameters, precision, num_moments)
    if not stage:
        return dict(states)
    gradient_bytes, elements = _gradient_bytes(workload), _num_trained(parameters)
    bucket = bucket_elements(parameters, options)
    if stage == 3:
        sharded = sum(_padded_for_stage_3(parameters, ranks)) // ranks
        shards = sum(-(-parameter.num_elements // ranks) * parameter.dtype.itemsize for parameter in parameters)
        persistent = sum(parameter.num_bytes for parameter in parameters if not _is_gathered(parameter, options))
        return {
            "parameters": shards + persistent,
            "gradients": sharded * precision.gradient.itemsize,
            "optimizer_states": sharded * _MASTER_BYTES * (1 + num_moments),
            "communication_buffers": bucket * gradient_bytes if options.get("contiguous_gradients", True) else 0,
        }
    partition = partition_of(parameters, ranks)
    found: dict[MemoryCategory, int] = {
        "parameters": states["parameters"],
        "optimizer_states": sum(partition.sharded_elements) * _MASTER_BYTES * (1 + num_moments),
    }
    if keeps_whole_fp32_gradients(workload, options):
        found["gradients"] = low_precision_gradient_bytes(workload, parameters) + elements * _MASTER_BYTES
        return found
    reduction = reduction_of(workload, parameters, layout, options)
    kept = partition.kept_elements(partition.largest_rank())
    if stage == 1 and workload.training.num_micro_batches > 1:
        kept = elements  # those of the first one find no room in the bucket
    elif precision.gradient is not precision.compute:
        kept = sum(partition.sharded_elements)
    found["gradients"] = kept * gradient_bytes
    buckets = reduction.num_buckets * reduction.bucket_elements if reduction.contiguous else 0
    found["communication_buffers"] = buckets * precision.compute.itemsize
    return found


def low_precision_gradient_bytes(workload: Workload, parameters: Sequence[LogicalParameter]) -> int:
    """Of those that autograd makes, where DeepSpeed's bf16 optimizer adds them to whole fp32 ones and lets them go."""
    return _num_trained(parameters) * workload.precision.compute.itemsize


def reduction_of(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> Reduction:
    """What becomes of gradients in a backward of stage 0, 1 or 2."""
    precision, stage = workload.precision, options.get("stage", 1)
    overlaps = bool(options.get("overlap_comm"))
    return Reduction(
        stage=stage,
        partition=partition_of(parameters, layout.data),
        num_micro_batches=workload.training.num_micro_batches,
        at_once=stage == 2 or (stage == 1 and overlaps),
        num_buckets=2 if overlaps else 1,
        bucket_elements=bucket_elements(parameters, options),
        contiguous=options.get("contiguous_gradients", True),
        scatters=options.get("reduce_scatter", True),
        to_owners=not options.get("use_multi_rank_bucket_allreduce", True),
        takes_norm=workload.training.checks_norm or not may_leave_out_norm(workload, options),
        sum_dtype=precision.gradient,
        kept_dtype=precision.gradient,
        master_dtype=torch.float32,
    )


def gathering_of(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> Gathering:
    """What is gathered and summed in a micro-batch of stage 3."""
    return Gathering(
        gathered=[parameter for parameter in parameters if _is_gathered(parameter, options)],
        trained=[parameter for parameter in parameters if parameter.trainable],
        num_ranks=layout.data,
        bucket_elements=bucket_elements(parameters, options),
        scatters=options.get("reduce_scatter", True) or not options.get("contiguous_gradients", True),
        casts=not options.get("contiguous_gradients", True),
        sum_dtype=workload.precision.gradient,
    )


def wire_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> int | None:
    """None where what is sent follows from DeepSpeed's trace of modules, or from how its buckets are filled."""
    stage, ranks = options.get("stage", 1), layout.data
    num_micro_batches = workload.training.num_micro_batches
    if not stage:
        summed = _num_trained(parameters) * _gradient_bytes(workload)
        return all_reduce_wire_bytes(summed, ranks) + _norm_bytes(workload, parameters, layout, options)
    if why_no_bytes(workload, parameters, layout, options):
        return None
    if stage == 3:
        padded = sum(_padded_for_stage_3(parameters, ranks))
        sent = num_micro_batches * all_reduce_wire_bytes(padded * _gradient_bytes(workload), ranks)
        sent += _gathered_bytes(workload, parameters, ranks, options)
    else:
        num_sums = num_micro_batches if stage == 2 else 1
        sent = num_sums * _reduced_to_owners(workload, parameters, layout, options)
        padded = sum(padded_elements(group, ranks) for group in decay_groups_of(parameters))
        sent += padded * workload.precision.compute.itemsize * (ranks - 1) // ranks
    return sent + _norm_bytes(workload, parameters, layout, options)


def traffic_of(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> Traffic | None:
    """The bytes of `wire_bytes` from rank to rank: gloo's all-reduces and all-gathers go around rings. None where these
    are not known, or where gradients are reduced to their owners."""
    if options.get("stage", 1) in (1, 2) and reduces_to_owners(options):
        return None
    sent = wire_bytes(workload, parameters, layout, options)
    if sent is None:
        return None
    return traffic.total(traffic.ring(ranks, sent) for ranks in layout.groups("data"))


def why_no_memory(parameters: Sequence[LogicalParameter], options: Mapping[str, Any]) -> str | None:
    """Why bytes of memory by category are not known, or None."""
    if options.get("offload_optimizer"):
        return "offload_optimizer takes optimizer states off the device, a piece at a time"
    if options.get("stage", 1) != 3:
        return None
    if not keeps_gathered(options):
        return "what stage 3 lets go and gathers again follows from DeepSpeed's trace of modules"
    return _why_not_all_gathered(parameters)


def why_no_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> str | None:
    """Why bytes sent in a step are not known, or None."""
    stage = options.get("stage", 1)
    if not stage:
        return None
    if options.get("zero_hpz_partition_size", 1) > 1:
        return "which gathers of stage 3 stay within zero_hpz_partition_size follows from DeepSpeed's trace of modules"
    if stage == 3:
        return _why_not_all_gathered(parameters) if keeps_gathered(options) else None
    if reduces_to_owners(options) and bucket_elements(parameters, options) < _num_trained(parameters):
        return "gloo's cut of each reduction to an owner matters, and reduce_bucket_size makes several of them"
    return None


def _why_not_all_gathered(parameters: Sequence[LogicalParameter]) -> str | None:
    if (elements := _num_trained(parameters)) <= _PREFETCHED_ELEMENTS:
        return None
    return (
        f"stage 3 gathers at most {_PREFETCHED_ELEMENTS:,} elements ahead, of {elements:,}: what it lets go follows "
        f"from DeepSpeed's trace of modules"
    )


def _reduced_to_owners(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> int:
    """What sums of one backward cost the rank that sends most. An all-reduce of everything, or of each owner's part a
    reduction to it."""
    reduction = reduction_of(workload, parameters, layout, options)
    elements, item_bytes = _num_trained(parameters), _gradient_bytes(workload)
    if not reduces_to_owners(options):
        return all_reduce_wire_bytes(elements * item_bytes, layout.data)
    owned = [0] * layout.data
    for pieces in reduction.partition.pieces.values():
        for piece in pieces:
            owned[piece.owner] += piece.num_elements * item_bytes
    return max(
        sum(
            wire_bytes_of("reduce", num_bytes, layout.data, "gloo", group_rank=rank, root=owner)
            for owner, num_bytes in enumerate(owned)
        )
        for rank in range(layout.data)
    )


def _gathered_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], ranks: int, options: Mapping[str, Any]
) -> int:
    """Small parameters once, after the update; the others for every micro-batch, once more where they do not stay."""
    of_others = workload.training.num_micro_batches * (1 if keeps_gathered(options) else 2)
    total = 0
    for parameter in parameters:
        times = of_others if _is_gathered(parameter, options) else 1
        total += times * (ranks - 1) * -(-parameter.num_elements // ranks) * parameter.dtype.itemsize
    return total


def _is_gathered(parameter: LogicalParameter, options: Mapping[str, Any]) -> bool:
    """Whether it is not whole between steps."""
    given = options.get("stage3_param_persistence_threshold")
    return parameter.num_elements > (_PERSISTENT_ELEMENTS if given is None else given)


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
    num_groups = len(list(decay_groups_of(parameters)))
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


def _padded_for_stage_3(parameters: Sequence[LogicalParameter], ranks: int) -> Iterator[int]:
    for parameter in parameters:
        if parameter.trainable:
            yield ranks * -(-parameter.num_elements // ranks)
