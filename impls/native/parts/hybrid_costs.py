"""What a product of data and tensor parallelism costs a rank: the data axis' own closed forms, over the slices of one
tensor rank (parts/tensor_dry_run.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.layout import Layout
from harness.parameters import MemoryCategory, all_reduce_wire_bytes, broadcast_wire_bytes, replicated_state_bytes
from harness.workload import Workload
from impls.native.parts import zero_costs
from impls.native.parts.tensor_dry_run import TensorCosts, tensor_costs
from impls.native.parts.zero_plan import ZeroPlan, plan_zero


def memory_bytes(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> dict[MemoryCategory, int] | None:
    """States by category, of the rank that holds most; None where that is not known."""
    costs = _costs(workload, layout, options)
    if costs is None:
        return None
    shares_memory = options.get("transport") == "shared_memory"
    if options.get("stage", 0):
        plan = _plan(workload, layout, options, costs)
        states = zero_costs.memory_bytes(plan, workload, costs.parameters, layout, shares_memory=shares_memory)
    else:
        states = replicated_state_bytes(costs.parameters, workload.precision, workload.training.num_moments)
    exchanged = 2 * costs.largest_bytes if shares_memory and layout.tensor > 1 else 0
    return {**states, "communication_buffers": states.get("communication_buffers", 0) + exchanged}


def wire_bytes(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> int | None:
    """What one rank sends in a step, of the rank that sends most; None where that is not known."""
    costs = _costs(workload, layout, options)
    if costs is None:
        return None
    stage = options.get("stage", 0)
    sent = costs.activation_bytes + costs.norm_bytes
    sent += costs.partial_bytes * (workload.training.num_micro_batches if stage > 1 else 1)
    if stage:
        return sent + zero_costs.wire_bytes(_plan(workload, layout, options, costs), workload, layout)
    states = replicated_state_bytes(costs.parameters, workload.precision, workload.training.num_moments)
    sent += all_reduce_wire_bytes(states["gradients"], layout.data)
    return sent + broadcast_wire_bytes(workload.buffer_bytes(), layout.data)


def _costs(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> TensorCosts | None:
    if layout.pipeline > 1 or workload.tensor_plan is None:
        return None
    cuts_sequence = options.get("sequence_parallel", False)
    return tensor_costs(workload, layout.tensor, data_degree=layout.data, cuts_sequence=cuts_sequence)


def _plan(workload: Workload, layout: Layout, options: Mapping[str, Any], costs: TensorCosts) -> ZeroPlan:
    return plan_zero(
        workload,
        costs.parameters,
        layout,
        stage=options["stage"],
        bucket_bytes=options.get("bucket_bytes"),
        reshards=options.get("reshard_after_forward", True),
        kinds=costs.kinds.__getitem__,
    )
