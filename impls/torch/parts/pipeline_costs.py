"""What torch's pipelining costs a rank: bytes of memory by category and bytes sent in a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness import traffic
from harness.layout import Layout
from harness.parameters import (
    LogicalParameter,
    MemoryCategory,
    all_reduce_wire_bytes,
    largest_of_each,
    replicated_state_bytes,
)
from harness.traffic import Traffic
from harness.workload import Workload
from impls.torch.parts.pipeline_plan import PipelinePlan


def memory_bytes(
    plan: PipelinePlan, workload: Workload, parameters: Sequence[LogicalParameter]
) -> dict[MemoryCategory, int]:
    """Each of the rank that needs most of it: parameters with their states, and a place for whatever a rank receives
    with each micro-batch of a step, kept from step to step. What a stage hands on to another of the same rank takes the
    place of the last step's, which is there for a moment more."""
    return largest_of_each(_memory_bytes(plan, workload, parameters, rank) for rank in range(plan.num_ranks))


def wire_bytes(
    plan: PipelinePlan, workload: Workload, parameters: Sequence[LogicalParameter], *, data_degree: int = 1
) -> int:
    """Of the rank that sends most: activations forward, their gradients back, the sums of parameters' gradients over
    replicas and of those that several ranks of a pipeline hold, and the norm where the recipe needs it."""
    return max(_wire_bytes(plan, workload, parameters, data_degree, rank) for rank in range(plan.num_ranks))


def traffic_of(
    plan: PipelinePlan, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout
) -> Traffic:
    """The bytes of `wire_bytes` from rank to rank; norms left out."""
    parts = []
    for ranks in layout.groups("pipeline"):
        place_of = [ranks[place] for place in plan.rank_of]
        messages = Traffic()
        for stage in range(plan.num_stages - 1):
            here, there = place_of[stage], place_of[stage + 1]
            if here != there:
                messages[here, there] += workload.training.num_micro_batches * plan.activation_bytes(stage)
                messages[there, here] += workload.training.num_micro_batches * plan.gradient_bytes(stage)
        parts.append(messages)
        for parameter in parameters:
            holders = plan.held_by.get(parameter.name, [])
            if parameter.trainable and len(holders) > 1:
                parts.append(traffic.all_reduce([ranks[holder] for holder in holders], parameter.num_bytes))
    for ranks in layout.groups("data"):
        names = plan.names_on(layout.coordinates(ranks[0]).pipeline)
        trained = sum(p.num_bytes for p in parameters if p.trainable and p.name in names)
        parts.append(traffic.all_reduce(ranks, trained))
    return traffic.total(parts)


def _memory_bytes(
    plan: PipelinePlan, workload: Workload, parameters: Sequence[LogicalParameter], rank: int
) -> dict[MemoryCategory, int]:
    names = plan.names_on(rank)
    held = [parameter for parameter in parameters if parameter.name in names]
    states = replicated_state_bytes(held, workload.precision, workload.training.num_moments)
    received, handed_over = 0, 0
    for stage in plan.stages_on(rank):
        if stage > 0:
            received += plan.activation_bytes(stage - 1)
        if stage + 1 < plan.num_stages:
            received += plan.gradient_bytes(stage)
            if plan.rank_of[stage + 1] == rank:
                handed_over = max(handed_over, plan.activation_bytes(stage))
    return {**states, "communication_buffers": workload.training.num_micro_batches * received + handed_over}


def _wire_bytes(
    plan: PipelinePlan, workload: Workload, parameters: Sequence[LogicalParameter], data_degree: int, rank: int
) -> int:
    sent, trained = 0, 0
    for stage in plan.stages_on(rank):
        if stage + 1 < plan.num_stages and plan.rank_of[stage + 1] != rank:
            sent += plan.activation_bytes(stage)
        if stage > 0 and plan.rank_of[stage - 1] != rank:
            sent += plan.gradient_bytes(stage - 1)
    sent *= workload.training.num_micro_batches
    for parameter in parameters:
        holders = plan.held_by.get(parameter.name, [])
        if parameter.trainable and rank in holders:
            sent += all_reduce_wire_bytes(parameter.num_bytes, len(holders))
            trained += parameter.num_bytes
    sent += all_reduce_wire_bytes(trained, data_degree)
    if workload.training.checks_norm:
        sent += (plan.num_ranks - 1) * torch.float64.itemsize
    return sent
