"""What the sharded optimizer costs a rank, from its plan: bytes of memory by category and bytes sent in a step.

With P parameters in fp32 under AdamW and N shards the textbook says 16P bytes of states for data parallel, 8P + 8P/N
for stage 1, 4P + 12P/N for stage 2, 16P/N for stage 3; with fp32 masters under bf16 16P, 4P + 12P/N, 2P + 14P/N, 16P/N
(Rajbhandari et al. 2020, "ZeRO"). The same sums are taken here over the flats as they lie, with the padding at the ends
of shards; beside them stands what is lent in turn: slots, and room for what peers send.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness import traffic
from harness.layout import Axis, Layout
from harness.parameters import LogicalParameter, MemoryCategory, all_reduce_wire_bytes, broadcast_wire_bytes
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Workload
from impls.native.parts import hierarchy
from impls.native.parts.gradient_shards import MAX_IN_FLIGHT, Flat, slot_bytes, staging_bytes
from impls.native.parts.hierarchy import Hierarchical
from impls.native.parts.synchronised_batch_norm import summed_bytes
from impls.native.parts.zero_plan import ZeroPlan

_NORM_BYTES = torch.float64.itemsize


def gradient_flats(plan: ZeroPlan, workload: Workload) -> list[Flat]:
    """The trained flats as their gradients are exchanged."""
    precision = workload.precision
    return [
        Flat(
            num_shard_elements=flat.plan.num_shard_elements,
            dtype=precision.gradient if precision.master else flat.plan.bucket.dtype,
            slot=flat.gradient_slot,
            lent=plan.stage > 1,
        )
        for flat in plan.flats
        if flat.trainable
    ]


def parameter_flats(plan: ZeroPlan) -> list[Flat]:
    """All flats as their parameters are gathered."""
    return [
        Flat(num_shard_elements=flat.plan.num_shard_elements, dtype=flat.plan.bucket.dtype, slot=flat.parameter_slot)
        for flat in plan.flats
    ]


def memory_bytes(
    plan: ZeroPlan,
    workload: Workload,
    parameters: Sequence[LogicalParameter],
    layout: Layout,
    *,
    shares_memory: bool,
) -> dict[MemoryCategory, int]:
    """By category, of the first rank: it holds most, since padding lies at the end."""
    num_ranks = layout.shard_degree
    gradients, gathered = gradient_flats(plan, workload), parameter_flats(plan)
    if plan.shards_parameters:
        of_parameters = sum(flat.shard_bytes for flat in gathered)
    else:
        in_flats = {segment.parameter.name for flat in plan.flats for segment in flat.plan.bucket.segments}
        of_parameters = num_ranks * sum(flat.shard_bytes for flat in gathered)
        of_parameters += sum(parameter.num_bytes for parameter in parameters if parameter.name not in in_flats)
    whole = sum(slot_bytes(gradients, num_ranks).values())
    return {
        "parameters": of_parameters,
        "gradients": whole if plan.stage == 1 else sum(flat.shard_bytes for flat in gradients),
        "optimizer_states": _state_bytes(plan, workload),
        "communication_buffers": _buffer_bytes(plan, workload, gradients, num_ranks, shares_memory=shares_memory),
    }


def comes_late(plan: ZeroPlan, workload: Workload) -> bool:
    """Whether shards of gradients are not there yet when the last forward ends: no micro-batch has been reduced."""
    return plan.stage > 1 and workload.training.num_micro_batches == 1


def late_bytes(plan: ZeroPlan, workload: Workload, layout: Layout, *, shares_memory: bool) -> int:
    """Of these, what comes and goes in the course of a step: shards of gradients that are not kept whole and, where
    peers do not map them, buffers."""
    gradients = gradient_flats(plan, workload)
    late = sum(flat.shard_bytes for flat in gradients) if comes_late(plan, workload) else 0
    if shares_memory:
        return late
    return late + _buffer_bytes(plan, workload, gradients, layout.shard_degree, shares_memory=False)


def wire_bytes(plan: ZeroPlan, workload: Workload, layout: Layout) -> int:
    """What one rank sends in a step, of the rank that sends most: (n-1)/n of the gradients to be summed within its
    shard group, after each micro-batch where they are not kept whole, and 2(r-1)/r of its shard across r groups;
    (n-1)/n of the parameters for each time they are gathered; norms, buffers and sums of synchronised BatchNorm."""
    others, num_replicas = layout.shard_degree - 1, layout.data // layout.shard_degree
    training = workload.training
    gradients, gathered = gradient_flats(plan, workload), parameter_flats(plan)
    exchanges = training.num_micro_batches if plan.stage > 1 else 1
    sent = exchanges * others * sum(flat.shard_bytes for flat in gradients)
    sent += sum(all_reduce_wire_bytes(flat.shard_bytes, num_replicas) for flat in gradients)
    if plan.shards_parameters:
        of_unit = [0] * len(plan.modules)
        for flat, planned in zip(gathered, plan.flats, strict=True):
            of_unit[planned.unit] += flat.shard_bytes
        sent += others * sum(of_unit[unit] for unit in plan.gathered_units(training.num_micro_batches))
    else:
        sent += others * sum(flat.shard_bytes for flat in gathered)
    if training.checks_norm:
        sent += others * _NORM_BYTES
    if workload.synchronise_batch_norm:
        sums = training.num_micro_batches * summed_bytes(workload, layout.data)
        sent += all_reduce_wire_bytes(sums, layout.data)
    return sent + broadcast_wire_bytes(workload.buffer_bytes(), layout.data)


def traffic_of(
    plan: ZeroPlan, workload: Workload, layout: Layout, seats: Seats, hierarchical: Hierarchical = "auto"
) -> Traffic:
    """The bytes of `wire_bytes` from rank to rank, on the CPU over the process group; norms left out."""
    training = workload.training
    gradients, gathered = gradient_flats(plan, workload), parameter_flats(plan)
    exchanged = (training.num_micro_batches if plan.stage > 1 else 1) * sum(flat.shard_bytes for flat in gradients)
    fetched = sum(flat.shard_bytes for flat in gathered)
    if plan.shards_parameters:
        of_unit = [0] * len(plan.modules)
        for flat, planned in zip(gathered, plan.flats, strict=True):
            of_unit[planned.unit] += flat.shard_bytes
        fetched = sum(of_unit[unit] for unit in plan.gathered_units(training.num_micro_batches))
    axes: tuple[Axis, ...] = ("shard", "replicate")
    is_hierarchical = {
        axis: hierarchy.is_chosen(hierarchical, layout, seats, axis, torch.device("cpu")) for axis in axes
    }
    parts: list[Traffic] = []
    for ranks in layout.groups("shard"):
        if is_hierarchical["shard"]:
            parts.append(hierarchy.reduce_scatter_traffic(seats.by_node(ranks), exchanged))
            parts.append(hierarchy.all_gather_traffic(seats.by_node(ranks), fetched))
        else:
            parts += [traffic.exchange(ranks, exchanged), traffic.all_gather_by_trees(ranks, fetched)]
    shard_bytes = sum(flat.shard_bytes for flat in gradients)
    for ranks in layout.groups("replicate"):
        if is_hierarchical["replicate"]:
            parts.append(hierarchy.all_reduce_traffic(seats.by_node(ranks), shard_bytes))
        else:
            parts.append(traffic.all_reduce(ranks, shard_bytes))
    sums = training.num_micro_batches * summed_bytes(workload, layout.data) if workload.synchronise_batch_norm else 0
    for ranks in layout.groups("data"):
        parts += [traffic.all_reduce(ranks, sums), traffic.tree(ranks, 0, workload.buffer_bytes())]
    return traffic.total(parts)


def _buffer_bytes(
    plan: ZeroPlan, workload: Workload, gradients: Sequence[Flat], num_ranks: int, *, shares_memory: bool
) -> int:
    """At most: each slot with the largest of its flats, and the pieces of the largest flats in flight."""
    total = sum(slot_bytes(gradients, num_ranks).values()) if plan.stage > 1 else 0
    if plan.shards_parameters and not shares_memory:
        # Where ranks share memory they read each other's shards where they lie.
        total += sum(slot_bytes(parameter_flats(plan), num_ranks).values())
    takes_one = comes_late(plan, workload)
    pieces = sorted(
        staging_bytes(flat, num_ranks, takes_one=takes_one, shares_memory=shares_memory) for flat in gradients
    )
    return total + sum(pieces[-MAX_IN_FLIGHT:])


def _state_bytes(plan: ZeroPlan, workload: Workload) -> int:
    training, master = workload.training, workload.precision.master
    total = 0
    for flat in plan.flats:
        if flat.trainable:
            itemsize = (master or flat.plan.bucket.dtype).itemsize
            total += flat.plan.shard(0).num_elements * itemsize * (training.num_moments + (master is not None))
    return total
