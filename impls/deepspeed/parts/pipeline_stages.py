"""A workload's chain as layers of DeepSpeed's PipelineModule: one a stage, so that stages are cut as elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harness import chain
from harness.chain import Border, Chain, TensorShape, as_value, borders, chain_of, holders_of, run_blocks
from harness.implementation import phase
from harness.parameters import (
    LogicalParameter,
    MemoryCategory,
    all_reduce_wire_bytes,
    largest_of_each,
    logical_parameters,
    replicated_state_bytes,
)
from harness.stage_costs import stages_of
from harness.workload import Workload

Partition = Literal["uniform", "parameters", "flops"]
"""What stages are to have alike; neither time nor memory, which go by the native schedules."""
_TIE = "tied"


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The blocks of each stage, what it hands on with the first micro-batch, the ranks that hold each parameter, and
    the shapes that micro-batches have."""

    stages: tuple[range, ...]
    outputs: tuple[Border, ...]
    held_by: Mapping[str, list[int]]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def tied(self) -> dict[str, list[int]]:
        """The parameters that several stages hold, and which."""
        return {name: ranks for name, ranks in self.held_by.items() if len(ranks) > 1}


def plan(workload: Workload, num_stages: int, partition: Partition) -> StagePlan:
    """One stage a rank."""
    stages = tuple(stages_of(workload, num_stages, partition, in_flight=()))
    inputs = [micro_batch.inputs for micro_batch in workload.batch(0).micro_batches]
    handed_on = borders(workload, inputs[0])
    blocks = chain_of(workload)
    return StagePlan(
        stages=stages,
        outputs=tuple(handed_on[of_stage.stop - 1] for of_stage in stages),
        held_by=holders_of(blocks.model, blocks.blocks, stages, range(num_stages)),
        shapes=tuple(dict.fromkeys(tuple(tensor.shape) for tensor in inputs)),
    )


def why_not(workload: Workload, num_stages: int, partition: Partition, *, zero: bool) -> str | None:
    """What stands in the way of the pipeline, or None."""
    if reason := chain.why_not(workload, num_stages):
        return reason
    planned = plan(workload, num_stages, partition)
    if len(planned.shapes) > 1:
        # They could ask their neighbours each time; an answer that never comes would tell garbage in a null step.
        return f"DeepSpeed's stages take micro-batches of one shape, got {' and '.join(map(str, planned.shapes))}"
    if len({tuple(ranks) for ranks in planned.tied.values()}) > 1:
        return f"a stage of DeepSpeed's shares parameters with the same stages, got {planned.tied}"
    if reason := _unlike_groups(planned, workload, zero=zero):
        return reason
    for border in planned.outputs[:-1]:
        for shape in border:
            if shape.dtype.is_floating_point and not shape.carries_gradient:
                return f"DeepSpeed's stages send a gradient for every tensor of floats, {_told(shape)} has none"
    return None


def _unlike_groups(planned: StagePlan, workload: Workload, *, zero: bool) -> str | None:
    """Each stage has an optimizer of its own; ZeRO's sums the norm decay group by decay group, all stages together."""
    trained = [p for p in logical_parameters(workload.model_without_memory(), workload.decays) if p.trainable]
    num_groups = [
        len({parameter.decayed for parameter in trained if rank in planned.held_by.get(parameter.name, [])})
        for rank in range(len(planned.stages))
    ]
    if 0 in num_groups:
        return f"DeepSpeed needs a parameter to train on every stage, stage {num_groups.index(0)} holds none"
    if zero and len(set(num_groups)) > 1:
        told = ", ".join(map(str, num_groups))
        return f"DeepSpeed's ZeRO in a pipeline hangs unless each stage has as many decay groups, got {told}"
    return None


class Stage(nn.Module):
    """Consecutive blocks of a chain."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, value: Any) -> Any:
        with phase("forward"):
            return self.outputs(value)

    def outputs(self, value: Any) -> Any:
        inputs = list(value) if isinstance(value, tuple) else [value]
        # gloo takes a tensor's memory for its elements in order
        return as_value([tensor.contiguous() for tensor in run_blocks(list(self.blocks), inputs)])


class Shared(nn.Module):
    """The parameters that several stages hold, as DeepSpeed wants to find them: attributes of a module."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"weight{index}", parameter)


def pipeline_module(built: Chain, planned: StagePlan, rank: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The PipelineModule of this rank, which holds its stage's parameters. Collective."""
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    stages = [Stage([built.blocks[index] for index in of_stage]) for of_stage in planned.stages]
    named = dict(built.model.named_parameters())
    shared = [named[name] for name in planned.tied]
    sharing = {rank for ranks in planned.tied.values() for rank in ranks}
    attributes = [f"weight{index}" for index in range(len(shared))]
    module = PipelineModule(
        layers=[
            TiedLayerSpec(_TIE, Shared, shared, forward_fn=partial(_run, stage), tied_weight_attr=attributes)
            if index in sharing
            else stage
            for index, stage in enumerate(stages)
        ],
        num_stages=len(stages),
        loss_fn=loss,
        partition_method="uniform",
    )
    if rank in sharing:
        module.add_module("stage", stages[rank])
    return module


def memory_bytes(
    planned: StagePlan, workload: Workload, parameters: Sequence[LogicalParameter], *, zero: bool
) -> dict[MemoryCategory, int]:
    """Each of the rank that needs most of it: parameters with their states, a place for what a rank receives and the
    bucket of its gradients, which without ZeRO is a flat copy of them."""
    return largest_of_each(
        memory_bytes_of_rank(planned, workload, parameters, rank, zero=zero) for rank in range(len(planned.stages))
    )


def memory_bytes_of_rank(
    planned: StagePlan, workload: Workload, parameters: Sequence[LogicalParameter], rank: int, *, zero: bool
) -> dict[MemoryCategory, int]:
    held = [parameter for parameter in parameters if rank in planned.held_by.get(parameter.name, [])]
    states = replicated_state_bytes(held, workload.precision, workload.training.num_moments)
    received = sum(shape.num_bytes for shape in planned.outputs[rank - 1]) if rank else 0
    if rank + 1 < len(planned.stages):
        # One place serves activations and gradients alike, tensor by tensor, where it is large enough.
        received = max(received, sum(s.num_bytes for s in planned.outputs[rank] if s.dtype.is_floating_point))
    if zero:
        trained = sum(parameter.num_elements for parameter in held if parameter.trainable)
        states["optimizer_states"] = trained * torch.float32.itemsize * (1 + workload.training.num_moments)
    return {**states, "communication_buffers": received + states["gradients"]}


def wire_bytes(
    planned: StagePlan, parameters: Sequence[LogicalParameter], num_micro_batches: int, *, tells_norm: bool
) -> int:
    """Bytes that the busiest rank sends in a step: activations forward, gradients back, sums of what several stages
    hold, the loss from the last to all along gloo's tree; where ZeRO takes it, the norm of each decay group."""
    return max(
        _wire_bytes(planned, parameters, rank, num_micro_batches, tells_norm=tells_norm)
        for rank in range(len(planned.stages))
    )


def _wire_bytes(
    planned: StagePlan,
    parameters: Sequence[LogicalParameter],
    rank: int,
    num_micro_batches: int,
    *,
    tells_norm: bool,
) -> int:
    num_ranks = len(planned.stages)
    sent = 0
    if rank + 1 < num_ranks:
        sent += sum(shape.num_bytes for shape in planned.outputs[rank])
    if rank:
        sent += sum(shape.num_bytes for shape in planned.outputs[rank - 1] if shape.dtype.is_floating_point)
    sent *= num_micro_batches
    held = [p for p in parameters if p.trainable and rank in planned.held_by.get(p.name, [])]
    sent += sum(all_reduce_wire_bytes(p.num_bytes, len(planned.held_by[p.name])) for p in held)
    if tells_norm:
        num_groups = len({parameter.decayed for parameter in held})
        sent += num_groups * all_reduce_wire_bytes(torch.float32.itemsize, num_ranks)
    position = (rank + 1) % num_ranks  # from the last rank, which has the loss
    num_sends = sum(position < 1 << turn < num_ranks - position for turn in range(num_ranks.bit_length()))
    return sent + num_sends * 2 * torch.float32.itemsize


def _run(stage: Stage, shared: Shared, value: Any) -> Any:
    return stage(value)


def _told(shape: TensorShape) -> str:
    return f"one of {shape.shape} in {str(shape.dtype).removeprefix('torch.')}"
