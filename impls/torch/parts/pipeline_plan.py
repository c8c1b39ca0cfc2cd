"""Which stages of a workload are where, and who holds which parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.chain import Border, TensorShape, borders, chain_of, holders_of
from harness.layout import Layout
from harness.stage_costs import stages_of
from harness.workload import Workload
from impls.torch.parts.pipeline_schedules import ScheduleName, ranks_of_stages

Partition = Literal["uniform", "parameters", "flops"]
"""What stages are to have alike; neither time nor memory, which go by the native schedules."""


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The blocks of each stage, the rank of each, what it takes in and hands on with one micro-batch; and the ranks
    that use each parameter, by its first name."""

    stages: tuple[range, ...]
    rank_of: tuple[int, ...]
    inputs: tuple[Border, ...]
    outputs: tuple[Border, ...]
    held_by: Mapping[str, list[int]]

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of) + 1

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def activation_bytes(self, stage: int) -> int:
        """What the stage hands on with one micro-batch."""
        return sum(shape.num_bytes for shape in self.outputs[stage])

    def gradient_bytes(self, stage: int) -> int:
        """What comes back for it."""
        return sum(shape.num_bytes for shape in self.outputs[stage] if shape.carries_gradient)

    def stages_on(self, rank: int) -> list[int]:
        return [stage for stage, on in enumerate(self.rank_of) if on == rank]

    def names_on(self, rank: int) -> set[str]:
        return {name for name, ranks in self.held_by.items() if rank in ranks}


def plan(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> PipelinePlan:
    """As the options of torch.pipeline have it."""
    schedule: ScheduleName = options.get("schedule", "1f1b")
    partition: Partition = options.get("partition", "flops")
    rank_of = ranks_of_stages(schedule, layout.pipeline, options.get("chunks", 1))
    stages = stages_of(workload, len(rank_of), partition, in_flight=())
    inputs = workload.batch(0, data_degree=layout.data).micro_batches[0].inputs
    handed_on = borders(workload, inputs)
    outputs = tuple(handed_on[blocks.stop - 1] for blocks in stages)
    chain = chain_of(workload)
    return PipelinePlan(
        stages=stages,
        rank_of=tuple(rank_of),
        inputs=((TensorShape.of(inputs),), *outputs[:-1]),
        outputs=outputs,
        held_by=holders_of(chain.model, chain.blocks, stages, rank_of),
    )
