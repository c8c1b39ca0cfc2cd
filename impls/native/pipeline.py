"""Pipeline parallelism: the model's blocks are cut into stages, micro-batches go through them by a schedule
(parts/schedules.py). Gradients and updates are those of data parallelism over one rank (ddp.py) on this rank's stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from harness.block_times import block_seconds
from harness.chain import chain_of, holders_of, why_not
from harness.implementation import DryStep
from harness.layout import Layout
from harness.mesh import Mesh
from harness.parameters import LogicalParameter, MemoryCategory, largest_of_each, replicated_state_bytes
from harness.pipeline_marks import PredictedPipeline
from harness.placement import Seats
from harness.stage_costs import Partition, stages_of
from harness.traffic import Traffic
from harness.workload import Batch, Workload
from impls.native.ddp import DEFAULT_SMALL_BYTES, NativeDataParallel, bucket_plans
from impls.native.parts.dry_step import dry_step
from impls.native.parts.flat_optimizer import converted_bytes
from impls.native.parts.partial_model import build_partly
from impls.native.parts.pipeline_costs import RankCosts, rank_costs, traffic_along
from impls.native.parts.pipeline_executor import MAX_TENSORS
from impls.native.parts.pipeline_messages import HeldMessages, Messages, NoMessages
from impls.native.parts.pipeline_model import PipelineStages
from impls.native.parts.pipeline_plan import PipelinePlan
from impls.native.parts.pipeline_timeline import play
from impls.native.parts.rank_model import RankModel
from impls.native.parts.schedules import Schedule, make

PipelineTransport = Literal["process_group", "none"]


class NativePipeline(NativeDataParallel):
    """`schedule` orders forwards and backwards; `chunks` is the number of stages on each rank, for the interleaved
    schedule. `partition` says what stages are to have alike: the number of blocks (uniform), parameters, FLOPs, time as
    the first rank measures it, or memory under that schedule. `transport="none"` sends nothing and waits for nobody: no
    training then, but the floor under this very code."""

    strategy = "pipeline_parallel"
    sends_by_the_book = True
    whose: ClassVar[str] = "native.pipeline"

    @classmethod
    def is_floor(cls, options: Mapping[str, Any]) -> bool:
        return options.get("transport") == "none"

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        schedule, chunks = options.get("schedule", "1f1b"), options.get("chunks", 1)
        try:
            make(schedule, num_ranks=1, num_micro_batches=1, num_chunks=chunks)
        except ValueError as error:
            return str(error)
        return None

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.data, layout.tensor) != (1, 1):
            return f"pipeline parallelism takes a pipeline degree alone, got {layout}"
        return why_not(workload, layout.pipeline * options.get("chunks", 1), max_tensors=MAX_TENSORS)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        """Of each category, of the rank whose stages have most of it."""
        costs = _costs(workload, layout, options)
        if costs is None:
            return None
        num_moments = workload.training.num_moments
        return largest_of_each(
            replicated_state_bytes(rank.parameters, workload.precision, num_moments) for rank in costs
        )

    @classmethod
    def dry_steps(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Sequence[Callable[[nn.Module], DryStep]]:
        """All ranks': one that holds fewer states may keep more activations."""
        planned = plan(workload, layout, options)
        if planned is None:
            return ()
        batch = planned.largest_batch()
        return [partial(_dry_step, planned, rank, batch, options) for rank in range(planned.num_ranks)]

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        costs = _costs(workload, layout, options)
        return None if costs is None else max(rank.sent_bytes for rank in costs)

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        planned, costs = plan(workload, layout, options), _costs(workload, layout, options)
        return None if planned is None or costs is None else traffic_along(planned, costs, layout)

    @classmethod
    def predicted_pipeline(
        cls, workload: Workload, layout: Layout, options: Mapping[str, Any]
    ) -> PredictedPipeline | None:
        """As the schedule is played, which is its closed form where there are as many micro-batches as ranks; None
        where there is no pipeline."""
        if layout.pipeline == 1:
            return None
        schedule = _schedule(workload, layout, options)
        timeline = play(schedule.table(), schedule.num_stages)
        return PredictedPipeline(
            schedule=schedule.name,
            bubble_ratio=timeline.bubble(0),  # as any rank's: all are busy as long
            in_flight=schedule.in_flight(),
            timeline=timeline.draw(),
        )

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        schedule: str = "1f1b",
        chunks: int = 1,
        partition: Partition = "flops",
        transport: PipelineTransport = "process_group",
        direct_gradients: bool = True,
    ) -> None:
        if transport not in get_args(PipelineTransport):
            raise ValueError(
                f"{self.whose}: transport must be one of {', '.join(get_args(PipelineTransport))}, got {transport!r}"
            )
        self._messages = NoMessages if transport == "none" else Messages
        self._schedule = _schedule(workload, layout, {"schedule": schedule, "chunks": chunks})
        self._partition = partition
        super().__init__(workload, layout, mesh, device, direct_gradients=direct_gradients)

    def facts(self) -> Mapping[str, str]:
        return {**super().facts(), "transport": "none" if self._messages is NoMessages else "process_group"}

    def _make_model(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> RankModel:
        stages = agreed_stages(workload, mesh, device, schedule=self._schedule, partition=self._partition)
        module = build_partly(workload, _names_here(workload, stages, mesh), device)
        whole = RankModel(workload, device, self.whose, module=module)
        return pipeline_stages(whole, mesh, self.whose, schedule=self._schedule, stages=stages, messages=self._messages)


def agreed_stages(
    workload: Workload, mesh: Mesh, device: torch.device, *, schedule: Schedule, partition: Partition
) -> tuple[range, ...]:
    """The blocks of each stage: one cut for all ranks, though other slices and replicas of the model would measure
    other times. Collective."""
    seconds = measured_by_first(workload, device, mesh.group("world")) if partition == "time" else None
    return stages_of(workload, schedule.num_stages, partition, schedule.in_flight(), seconds)


def pipeline_stages(
    whole: RankModel,
    mesh: Mesh,
    whose: str,
    *,
    schedule: Schedule,
    stages: Sequence[range],
    messages: type[Messages] = Messages,
) -> PipelineStages:
    """This rank's stages of `whole`, by its place along the pipeline axis; `whole` needs no values of other stages'
    parameters. Collective."""
    group = mesh.group("pipeline")
    return PipelineStages(
        whole,
        group,
        whose,
        rank=group.rank(),
        stages=stages,
        schedule=schedule,
        make_ties=partial(mesh.part, "pipeline"),
        messages=messages(group, whole.device),
    )


def measured_by_first(workload: Workload, device: torch.device, group: dist.ProcessGroup) -> Sequence[float]:
    """The seconds of each block, as the first rank of `group` measures them while the others wait. Collective."""
    measured: list[Any] = [block_seconds(workload, device) if group.rank() == 0 else None]
    dist.broadcast_object_list(measured, group_src=0, group=group)
    found: Sequence[float] = measured[0]
    return found


def _names_here(workload: Workload, stages: Sequence[range], mesh: Mesh) -> set[str]:
    """The parameters that this rank's stages use."""
    chain = chain_of(workload)
    rank_of = [stage % mesh.layout.pipeline for stage in range(len(stages))]
    holders = holders_of(chain.model, chain.blocks, stages, rank_of)
    return {name for name, ranks in holders.items() if mesh.coordinates.pipeline in ranks}


def _schedule(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> Schedule:
    return make(
        options.get("schedule", "1f1b"),
        num_ranks=layout.pipeline,
        num_micro_batches=workload.training.num_micro_batches,
        num_chunks=options.get("chunks", 1),
    )


def plan(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> PipelinePlan | None:
    """None where the cut is made by time, which is measured as the ranks start."""
    schedule, partition = _schedule(workload, layout, options), options.get("partition", "flops")
    if partition == "time":
        return None
    return PipelinePlan(
        workload=workload,
        schedule=schedule,
        stages=stages_of(workload, schedule.num_stages, partition, schedule.in_flight()),
        data_degree=layout.data,
        tensor_degree=layout.tensor,
        cuts_sequence=options.get("sequence_parallel", False),
    )


def dry_part(
    planned: PipelinePlan, rank: int, batch: Batch, module: nn.Module, *, messages: type[Messages] = HeldMessages
) -> PipelineStages:
    """What the pipeline's `rank` has of `module`, for dry steps with `batch`."""
    whole, _ = planned.whole(module)
    part = planned.part(rank, whole, messages=messages)
    part.foresee(batch)
    return part


def _dry_step(planned: PipelinePlan, rank: int, batch: Batch, options: Mapping[str, Any], module: nn.Module) -> DryStep:
    messages = NoMessages if options.get("transport") == "none" else HeldMessages
    part = dry_part(planned, rank, batch, module, messages=messages)
    plans = bucket_plans(planned.workload, part.parameters, planned.data_degree, part.kinds)
    return dry_step(
        part,
        batch,
        lent_bytes=converted_bytes(plans, planned.workload.precision),
        small_bytes=DEFAULT_SMALL_BYTES,
        direct=options.get("direct_gradients", True),
    )


def _costs(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> tuple[RankCosts, ...] | None:
    planned = plan(workload, layout, options)
    return None if planned is None else rank_costs(planned)
