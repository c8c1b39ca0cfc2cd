"""Pipeline parallelism: the model's blocks are cut into stages, micro-batches go through them by a schedule
(parts/schedules.py). Gradients and updates are those of data parallelism over one rank (ddp.py) on this rank's stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from harness.layout import Layout
from harness.mesh import Mesh
from harness.parameters import LogicalParameter, MemoryCategory, replicated_state_bytes
from harness.partition import additive, cut
from harness.pipeline_marks import PredictedPipeline
from harness.workload import Workload
from impls.native.ddp import NativeDataParallel
from impls.native.parts.pipeline_actions import most_in_flight
from impls.native.parts.pipeline_chain import SkipConnection, borders
from impls.native.parts.pipeline_costs import RankCosts, rank_costs
from impls.native.parts.pipeline_model import PipelineStages
from impls.native.parts.pipeline_timeline import play
from impls.native.parts.rank_model import RankModel
from impls.native.parts.schedules import Schedule, make


class NativePipeline(NativeDataParallel):
    """`schedule` orders forwards and backwards; `chunks` is the number of stages on each rank, for the interleaved
    schedule. `partition` says what a stage is to cost: blocks alike, or by their parameters."""

    strategy = "pipeline_parallel"
    whose: ClassVar[str] = "native.pipeline"

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        schedule, chunks = options.get("schedule", "1f1b"), options.get("chunks", 1)
        try:
            make(schedule, num_ranks=1, num_micro_batches=1, num_chunks=chunks)
        except ValueError as error:
            return str(error)
        if options.get("partition", "parameters") not in ("uniform", "parameters"):
            return f"partition must be uniform or parameters, got {options['partition']!r}"
        return None

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.data, layout.tensor) != (1, 1):
            return f"pipeline parallelism takes a pipeline degree alone, got {layout}"
        if workload.chain is None:
            return f"workload {workload.name} has no chain: it does not say which blocks follow each other"
        if workload.uses_random_numbers:
            return "dropout in later stages draws other masks than one process does, so that nothing can be compared"
        if workload.synchronise_batch_norm or workload.depends_on_chunks:
            return "what depends on the samples of a micro-batch is not compared yet"
        num_stages = layout.pipeline * options.get("chunks", 1)
        num_blocks = len(workload.chain(workload.model_without_memory()))
        if num_blocks < num_stages:
            return f"{num_stages} stages need as many blocks, got the {num_blocks} of {workload.name}"
        try:
            borders(workload, workload.batch(0).micro_batches[0].inputs)
        except SkipConnection as error:
            return str(error)
        return None

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        """Of the rank whose stages have most."""
        training, precision = workload.training, workload.precision
        of_ranks = [
            replicated_state_bytes(rank.parameters, precision, training.num_moments)
            for rank in _costs(workload, layout, options)
        ]
        return max(of_ranks, key=lambda states: sum(states.values()))

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        return max(rank.sent_bytes for rank in _costs(workload, layout, options))

    @classmethod
    def predicted_pipeline(
        cls, workload: Workload, layout: Layout, options: Mapping[str, Any]
    ) -> PredictedPipeline | None:
        """The played schedule's, which is the closed form's where there are as many micro-batches as ranks."""
        schedule = _schedule(workload, layout, options)
        table = schedule.table()
        in_flight = [
            most_in_flight([action for action in table[stage % schedule.num_ranks] if action.stage == stage])
            for stage in range(schedule.num_stages)
        ]
        bubble_ratio = play(table, schedule.num_stages).bubble(0)  # as any rank's: all are busy as long
        return PredictedPipeline(bubble_ratio=bubble_ratio, in_flight=tuple(in_flight))

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        schedule: str = "1f1b",
        chunks: int = 1,
        partition: str = "parameters",
        direct_gradients: bool = True,
    ) -> None:
        self._schedule = _schedule(workload, layout, {"schedule": schedule, "chunks": chunks})
        self._partition = partition
        super().__init__(workload, layout, mesh, device, direct_gradients=direct_gradients)

    def _make_model(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> RankModel:
        stages = stages_of(workload, self._schedule.num_stages, self._partition)
        pipeline_ranks = mesh.ranks("pipeline")

        def make_ties(places: Sequence[int]) -> dist.ProcessGroup | None:
            group: dist.ProcessGroup | None = dist.new_group([pipeline_ranks[place] for place in places])
            return group

        return PipelineStages(
            workload,
            device,
            mesh.group("pipeline"),
            self.whose,
            stages=stages,
            schedule=self._schedule,
            make_ties=make_ties,
        )


def _schedule(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> Schedule:
    return make(
        options.get("schedule", "1f1b"),
        num_ranks=layout.pipeline,
        num_micro_batches=workload.training.num_micro_batches,
        num_chunks=options.get("chunks", 1),
    )


def _costs(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> tuple[RankCosts, ...]:
    num_stages = layout.pipeline * options.get("chunks", 1)
    stages = stages_of(workload, num_stages, options.get("partition", "parameters"))
    return rank_costs(workload, stages, layout.pipeline)


def stages_of(workload: Workload, num_stages: int, partition: str) -> tuple[range, ...]:
    """The blocks of each stage. ValueError where there are fewer blocks than stages."""
    assert workload.chain is not None
    blocks = workload.chain(workload.model_without_memory())
    costs = [1.0 if partition == "uniform" else float(sum(p.numel() for p in block.parameters())) for block in blocks]
    return cut(len(blocks), num_stages, additive(costs))
