"""What a product of degrees costs a rank: the data axis' own closed forms, over the slices and stages that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import traffic
from harness.layout import Layout
from harness.parameters import (
    MemoryCategory,
    all_reduce_wire_bytes,
    broadcast_wire_bytes,
    largest_of_each,
    replicated_state_bytes,
)
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Workload
from impls.native.parts import zero_costs
from impls.native.parts.buckets import BucketPlan
from impls.native.parts.hierarchy import Hierarchical
from impls.native.parts.pipeline_costs import RankCosts
from impls.native.parts.replica_costs import replica_traffic
from impls.native.parts.tensor_dry_run import tensor_costs
from impls.native.parts.zero_plan import ZeroPlan, plan_zero


def memory_bytes(
    workload: Workload, layout: Layout, options: Mapping[str, Any], ranks: Sequence[RankCosts]
) -> dict[MemoryCategory, int]:
    """States by category, each of that of `ranks` which holds most of it."""
    return largest_of_each(rank_memory_bytes(workload, layout, options, rank) for rank in ranks)


def rank_memory_bytes(
    workload: Workload, layout: Layout, options: Mapping[str, Any], rank: RankCosts
) -> dict[MemoryCategory, int]:
    """States by category."""
    shares_memory = options.get("transport") == "shared_memory"
    if options.get("stage", 0):
        plan = _plan(workload, layout, options, rank)
        states = zero_costs.memory_bytes(plan, workload, rank.parameters, layout, shares_memory=shares_memory)
    else:
        states = replicated_state_bytes(rank.parameters, workload.precision, workload.training.num_moments)
    exchanged = 2 * rank.largest_bytes if shares_memory and layout.tensor > 1 else 0
    return {**states, "communication_buffers": states.get("communication_buffers", 0) + exchanged}


def late_bytes_and_shards(
    workload: Workload, layout: Layout, options: Mapping[str, Any], rank: RankCosts
) -> tuple[int, list[BucketPlan]]:
    """With a sharded optimizer: how many of these bytes come when backward is over, and what the first rank steps."""
    plan = _plan(workload, layout, options, rank)
    shares_memory = options.get("transport") == "shared_memory"
    late = zero_costs.late_bytes(plan, workload, layout, shares_memory=shares_memory)
    return late, [flat.plan.shard(0) for flat in plan.flats if flat.trainable]


def wire_bytes(workload: Workload, layout: Layout, options: Mapping[str, Any], ranks: Sequence[RankCosts]) -> int:
    """What one rank sends in a step, of that of `ranks` which sends most."""
    return max(_wire_bytes(workload, layout, options, rank) for rank in ranks)


def traffic_along_data(
    workload: Workload, layout: Layout, seats: Seats, options: Mapping[str, Any], ranks: Sequence[RankCosts]
) -> Traffic:
    """What the ranks of each data group send to each other, by the slices or stages that they hold."""
    hierarchical: Hierarchical = options.get("hierarchical", "auto")
    parts = []
    for stages, rank in enumerate(ranks):
        if options.get("stage", 0):
            plan = _plan(workload, layout, options, rank)
            of_all = zero_costs.traffic_of(plan, workload, layout, seats, hierarchical)
        else:
            states = replicated_state_bytes(rank.parameters, workload.precision, workload.training.num_moments)
            of_all = replica_traffic(states["gradients"], workload, layout, seats, hierarchical)
        parts.append(Traffic({pair: n for pair, n in of_all.items() if layout.coordinates(pair[0]).pipeline == stages}))
    return traffic.total(parts)


def slice_costs(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> RankCosts | None:
    """Of a rank without a pipeline; None where that is not known."""
    if workload.tensor_plan is None:
        return None
    cuts_sequence = options.get("sequence_parallel", False)
    costs = tensor_costs(workload, layout.tensor, data_degree=layout.data, cuts_sequence=cuts_sequence)
    if costs is None:
        return None
    num_sums = workload.training.num_micro_batches if options.get("stage", 0) > 1 else 1
    return RankCosts(
        parameters=costs.parameters,
        kinds=costs.kinds,
        sent_bytes=costs.activation_bytes + costs.norm_bytes + num_sums * costs.partial_bytes,
        largest_bytes=costs.largest_bytes,
    )


def _wire_bytes(workload: Workload, layout: Layout, options: Mapping[str, Any], rank: RankCosts) -> int:
    if options.get("stage", 0):
        return rank.sent_bytes + zero_costs.wire_bytes(_plan(workload, layout, options, rank), workload, layout)
    states = replicated_state_bytes(rank.parameters, workload.precision, workload.training.num_moments)
    summed = all_reduce_wire_bytes(states["gradients"], layout.data)
    return rank.sent_bytes + summed + broadcast_wire_bytes(workload.buffer_bytes(), layout.data)


def _plan(workload: Workload, layout: Layout, options: Mapping[str, Any], rank: RankCosts) -> ZeroPlan:
    return plan_zero(
        workload,
        rank.parameters,
        layout,
        stage=options["stage"],
        bucket_bytes=options.get("bucket_bytes"),
        reshards=options.get("reshard_after_forward", True),
        kinds=rank.kinds.__getitem__,
    )
