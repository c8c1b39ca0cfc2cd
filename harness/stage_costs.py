"""What a stage costs, by what stages are to have alike: blocks, parameters, FLOPs, time or memory.

An embedding has many parameters and no FLOPs, a head as many and all of them: stages alike in parameters are not alike
in time. Under 1F1B earlier stages hold more micro-batches' activations: stages alike in memory get longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from harness.block_costs import BlockCosts, analyse
from harness.chain import chain_of
from harness.parameters import LogicalParameter, replicated_state_bytes
from harness.partition import StageCost, additive, cut
from harness.workload import Workload

Partition = Literal["uniform", "parameters", "flops", "time", "memory"]


def stages_of(
    workload: Workload,
    num_stages: int,
    partition: Partition,
    in_flight: Sequence[int],
    seconds: Sequence[float] | None = None,
) -> tuple[range, ...]:
    """The blocks of each stage, the same on every rank that is given the same: `time` needs `seconds`. ValueError for
    fewer blocks than stages, and as `analyse`; `uniform` alone runs no block."""
    if partition not in get_args(Partition):
        raise ValueError(f"partition must be one of {', '.join(get_args(Partition))}, got {partition!r}")
    if partition == "uniform":
        num_blocks = len(chain_of(workload).blocks)
        return cut(num_blocks, num_stages, additive([1.0] * num_blocks))
    blocks = analyse(workload)
    return cut(len(blocks), num_stages, stage_costs(workload, blocks, in_flight, seconds)[partition])


def stage_costs(
    workload: Workload,
    blocks: Sequence[BlockCosts],
    in_flight: Sequence[int],
    seconds: Sequence[float] | None = None,
) -> Mapping[Partition, StageCost]:
    """The cost of each kind of partition. `in_flight` is, of each stage, how many micro-batches' activations it holds
    at a time, which its schedule says; `seconds` are those of each block, without which time is left out."""
    states, activations = state_bytes(workload, blocks), activation_bytes(blocks)
    costs: dict[Partition, StageCost] = {
        "uniform": additive([1.0] * len(blocks)),
        "parameters": _distinct(blocks, lambda parameter: parameter.num_elements),
        "flops": additive([block.flops for block in blocks]),
        "memory": lambda stage, *ends: states(stage, *ends) + in_flight[stage] * activations(stage, *ends),
    }
    return costs if seconds is None else {**costs, "time": additive(seconds)}


def state_bytes(workload: Workload, blocks: Sequence[BlockCosts]) -> StageCost:
    """Of a stage its parameters, gradients and optimizer states."""

    def of(parameter: LogicalParameter) -> int:
        states = replicated_state_bytes([parameter], workload.precision, workload.training.num_moments)
        return sum(states.values())

    return _distinct(blocks, of)


def activation_bytes(blocks: Sequence[BlockCosts]) -> StageCost:
    """Of a stage what it holds of each micro-batch in flight: what it has received, and what waits for backward."""
    kept = additive([block.kept_bytes for block in blocks])

    def of(stage: int, begin: int, end: int) -> float:
        received = blocks[begin - 1].border_bytes if begin else 0
        return received + kept(stage, begin, end) + blocks[end - 1].unkept_border_bytes

    return of


def _distinct(blocks: Sequence[BlockCosts], amount: Callable[[LogicalParameter], int]) -> StageCost:
    """Of a stage the sum over its blocks' parameters; one that several of them use counts once."""
    users: dict[str, list[int]] = {}
    amounts: dict[str, int] = {}
    for index, block in enumerate(blocks):
        for parameter in block.parameters:
            users.setdefault(parameter.name, []).append(index)
            amounts[parameter.name] = amount(parameter)
    everything = additive([sum(amounts[parameter.name] for parameter in block.parameters) for block in blocks])
    shared = {name: indices for name, indices in users.items() if len(indices) > 1}

    def cost(stage: int, begin: int, end: int) -> float:
        here = {name: sum(begin <= index < end for index in indices) for name, indices in shared.items()}
        return everything(stage, begin, end) - sum(amounts[name] * max(0, uses - 1) for name, uses in here.items())

    return cost
