"""Any product of data, tensor and pipeline degrees, with whatever is sharded along the data axis. This is where the
pieces are put together:

    along tensor      a slice of each layer of the tensor plan        tensor.py    \
    along pipeline    some stages of that                             pipeline.py  /  a RankModel
    along data        a replica of that, or shards of its states      ddp.py, zero.py

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from harness import traffic
from harness.implementation import DryStep, EvaluationOutput, Implementation, Prediction, StepOutput
from harness.layout import Layout
from harness.mesh import Mesh
from harness.parameters import LogicalParameter, MemoryCategory
from harness.pipeline_marks import PredictedPipeline
from harness.placement import Seats
from harness.stage_costs import Partition
from harness.traffic import Traffic
from harness.workload import Batch, Workload
from impls.native import pipeline
from impls.native.ddp import DEFAULT_SMALL_BYTES, NativeDataParallel, bucket_plans
from impls.native.parts import hybrid_costs
from impls.native.parts.dry_step import dry_step
from impls.native.parts.flat_optimizer import converted_bytes
from impls.native.parts.hierarchy import Hierarchical
from impls.native.parts.pipeline_costs import RankCosts, rank_costs, traffic_along
from impls.native.parts.rank_model import RankModel
from impls.native.parts.schedules import make
from impls.native.parts.shared_memory import Transport
from impls.native.parts.tensor_dry_run import largest_batch, slice_without_values
from impls.native.pipeline import NativePipeline, agreed_stages, pipeline_stages
from impls.native.tensor import NativeTensorParallel, tensor_slice
from impls.native.zero import NativeShardedOptimizer

Stage = Literal[0, 1, 2, 3]


class NativeHybrid(Implementation):
    """`stage` says what is sharded along the data axis (0: nothing). `transport` is that of the data and the tensor
    axis, each of which falls back to the process group where its ranks are on several machines; stages always send over
    the process group. All other options are those of the strategy they belong to."""

    strategy = "hybrid"
    transport_option = "transport"

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        stage = options.get("stage", 0)
        if stage not in get_args(Stage):
            return f"stage must be one of {', '.join(map(str, get_args(Stage)))}, got {stage!r}"
        of_data_axis = NativeShardedOptimizer if stage else NativeDataParallel
        return of_data_axis.refused_options(options) or NativePipeline.refused_options(options)

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        stage = options.get("stage", 0)
        if not stage and layout.shard not in (None, 1):
            return f"stage 0 shards nothing along the data axis, got {layout}; stages 1 to 3 do"
        if stage > 1 and layout.pipeline > 1:
            return (
                f"in a pipeline stage {stage} would exchange what it shards for every micro-batch: expected stage 0 or "
                f"1, got {layout}"
            )
        if layout.tensor > 1:
            reason = NativeTensorParallel.unsupported(workload, Layout(tensor=layout.tensor), device, options)
            if reason is not None:
                return reason
        if layout.pipeline > 1:
            reason = NativePipeline.unsupported(workload, Layout(pipeline=layout.pipeline), device, options)
            if reason is not None:
                return reason
        return workload.fits_data_degree(layout.data)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        """Of the first slice, each category on the rank of the pipeline whose stages have most of it."""
        ranks = _rank_costs(workload, layout, options)
        return hybrid_costs.memory_bytes(workload, layout, options, ranks) if ranks else None

    @classmethod
    def dry_steps(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Sequence[Callable[[nn.Module], DryStep]] | None:
        """Without a pipeline shards of slices are not foreseen."""
        if layout.tensor * layout.pipeline == 1:
            return super().dry_steps(workload, parameters, layout, options)
        ranks = _rank_costs(workload, layout, options)
        if not ranks or (options.get("stage", 0) and layout.pipeline == 1):
            return ()
        batch = largest_batch(workload, layout.data)
        planned = pipeline.plan(workload, layout, options) if layout.pipeline > 1 else None
        steps = []
        for rank, costs in enumerate(ranks):
            part: Callable[[nn.Module], RankModel] = partial(_slice, workload, layout, options)
            if planned is not None:
                part = partial(pipeline.dry_part, planned, rank, batch)
            held_bytes, lent_bytes = _held_and_lent_bytes(workload, layout, options, costs)
            steps.append(partial(_dry_step, part, batch, options, held_bytes=held_bytes, lent_bytes=lent_bytes))
        return steps

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        """Of the first slice, on the rank of the pipeline whose stages send most."""
        ranks = _rank_costs(workload, layout, options)
        return hybrid_costs.wire_bytes(workload, layout, options, ranks) if ranks else None

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        """None for slices within a pipeline."""
        ranks = _rank_costs(workload, layout, options)
        if not ranks or (layout.tensor > 1 and layout.pipeline > 1):
            return None
        along_data = hybrid_costs.traffic_along_data(workload, layout, seats, options, ranks)
        if layout.pipeline > 1:
            planned = pipeline.plan(workload, layout, options)
            return None if planned is None else traffic.total((along_data, traffic_along(planned, ranks, layout)))
        slices = (traffic.ring(group, ranks[0].sent_bytes) for group in layout.groups("tensor"))
        return traffic.total((along_data, *slices))

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        if layout.tensor > 1 and layout.pipeline == 1 and options.get("stage", 0):
            return {"peak": "shards of slices come and go otherwise than the dry run of whole ones has it"}
        return {}

    @classmethod
    def predicted_pipeline(
        cls, workload: Workload, layout: Layout, options: Mapping[str, Any]
    ) -> PredictedPipeline | None:
        return NativePipeline.predicted_pipeline(workload, layout, options)

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        stage: Stage = 0,
        reshard_after_forward: bool = True,
        transport: Transport = "process_group",
        sequence_parallel: bool = False,
        hierarchical: Hierarchical = "auto",
        schedule: str = "1f1b",
        chunks: int = 1,
        partition: Partition = "flops",
        bucket_bytes: int | None = None,
        direct_gradients: bool = True,
    ) -> None:
        if reason := self.refused_options({"stage": stage, "schedule": schedule, "chunks": chunks}):
            raise ValueError(f"native.hybrid: {reason}")

        def make_model() -> RankModel:
            if layout.tensor > 1:
                model: RankModel = tensor_slice(
                    workload,
                    layout,
                    mesh,
                    device,
                    "native.hybrid",
                    transport=transport,
                    sequence_parallel=sequence_parallel,
                )
            else:
                model = RankModel(workload, device, "native.hybrid")
            if layout.pipeline > 1:
                order = make(
                    schedule,
                    num_ranks=layout.pipeline,
                    num_micro_batches=workload.training.num_micro_batches,
                    num_chunks=chunks,
                )
                stages = agreed_stages(workload, mesh, device, schedule=order, partition=partition)
                model = pipeline_stages(model, mesh, "native.hybrid", schedule=order, stages=stages)
            return model

        options: dict[str, Any] = {"transport": transport, "direct_gradients": direct_gradients}
        options["hierarchical"] = hierarchical
        if bucket_bytes is not None:
            options["bucket_bytes"] = bucket_bytes
        if stage == 3:
            options["reshard_after_forward"] = reshard_after_forward
        if stage:
            options["stage"] = stage
        strategy = NativeShardedOptimizer if stage else NativeDataParallel
        along_data = _over(strategy, make_model)(workload, layout, mesh, device, **options)
        self._along_data: Implementation = along_data
        self.module = along_data.module

    def train_step(self, batch: Batch) -> StepOutput:
        self._along_data.tracks_gradient_norm = self.tracks_gradient_norm
        return self._along_data.train_step(batch)

    def evaluate(self, batch: Batch) -> EvaluationOutput | None:
        return self._along_data.evaluate(batch)

    def full_gradients(self) -> dict[str, Tensor]:
        return self._along_data.full_gradients()

    def full_parameters(self) -> dict[str, Tensor]:
        return self._along_data.full_parameters()

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]] | None:
        return self._along_data.full_optimizer_state()

    def full_buffers(self) -> dict[str, Tensor]:
        return self._along_data.full_buffers()

    def facts(self) -> Mapping[str, str]:
        return self._along_data.facts()

    def replicated_tensors(self) -> Iterable[Tensor]:
        return self._along_data.replicated_tensors()

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return self._along_data.memory_tensors()

    def close(self) -> None:
        self._along_data.close()


def _rank_costs(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> Sequence[RankCosts]:
    """Of each rank along the pipeline; none where that is not known."""
    if layout.pipeline == 1:
        costs = hybrid_costs.slice_costs(workload, layout, options)
        return () if costs is None else (costs,)
    planned = pipeline.plan(workload, layout, options)
    return () if planned is None else rank_costs(planned) or ()


def _slice(workload: Workload, layout: Layout, options: Mapping[str, Any], module: nn.Module) -> RankModel:
    """What a rank has of `module` without a pipeline."""
    cuts_sequence = options.get("sequence_parallel", False)
    model, _ = slice_without_values(
        workload, layout.tensor, data_degree=layout.data, cuts_sequence=cuts_sequence, module=module
    )
    return model


def _held_and_lent_bytes(
    workload: Workload, layout: Layout, options: Mapping[str, Any], costs: RankCosts
) -> tuple[int, int]:
    """What a rank holds all along, and what comes when backward is over: room for what is on its way between ranks,
    gradients in the masters' dtype."""
    states = sum(hybrid_costs.rank_memory_bytes(workload, layout, options, costs).values())
    if options.get("stage", 0):
        late, shards = hybrid_costs.late_bytes_and_shards(workload, layout, options, costs)
        return states - late, max(late, converted_bytes(shards, workload.precision))
    plans = bucket_plans(workload, costs.parameters, layout.data, costs.kinds.__getitem__)
    return states, converted_bytes(plans, workload.precision)


def _dry_step(
    part: Callable[[nn.Module], RankModel],
    batch: Batch,
    options: Mapping[str, Any],
    module: nn.Module,
    *,
    held_bytes: int,
    lent_bytes: int,
) -> DryStep:
    return dry_step(
        part(module),
        batch,
        held_bytes=held_bytes,
        lent_bytes=lent_bytes,
        small_bytes=0 if options.get("stage", 0) else DEFAULT_SMALL_BYTES,
        direct=options.get("direct_gradients", True),
    )


def _over(strategy: type[Implementation], make_model: Callable[[], RankModel]) -> type[Implementation]:
    """The strategy of the data axis, for what `make_model` makes instead of the workload's whole model."""
    return type("AlongData", (strategy,), {"whose": "native.hybrid", "_make_model": lambda *_: make_model()})
