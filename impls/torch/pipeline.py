"""torch's own pipeline parallelism, torch.distributed.pipelining: stages of the workload's chain, told their shapes
beforehand, under one of torch's schedules; a fused optimizer steps each rank's own stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.implementation import EvaluationOutput, Implementation, Prediction, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer
from harness.parameters import LogicalParameter, MemoryCategory
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, Workload
from impls.torch.parts import pipeline_costs, pipeline_limits, pipeline_schedules
from impls.torch.parts.pipeline_model import PipelineModel
from impls.torch.parts.pipeline_plan import Partition, plan
from impls.torch.parts.pipeline_schedules import ScheduleName

if TYPE_CHECKING:
    from impls.torch.parts.sharded_slices import ShardedSlices


class TorchPipeline(Implementation):
    """`schedule` orders forwards and backwards; `chunks` is the number of stages on each rank. Zero-bubble is torch's
    V-shaped schedule where there are two, its interleaved one elsewhere. `partition` says what stages are to have
    alike: the number of blocks (uniform), parameters or FLOPs."""

    strategy = "pipeline_parallel"
    makes_gradients = True

    model: PipelineModel | ShardedSlices

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        return pipeline_schedules.refused(options.get("schedule", "1f1b"), options.get("chunks", 1))

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.data, layout.tensor) != (1, 1):
            return f"pipeline parallelism takes a pipeline degree alone, got {layout}"
        return pipeline_limits.why_not(workload, layout, options)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return pipeline_costs.memory_bytes(plan(workload, layout, options), workload, parameters)

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        return pipeline_costs.wire_bytes(plan(workload, layout, options), workload, parameters)

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        return pipeline_costs.traffic_of(plan(workload, layout, options), workload, parameters, layout)

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        return {"peak": "torch's schedule takes a rank's step, which does not run on tensors without memory"}

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        schedule: ScheduleName = "1f1b",
        chunks: int = 1,
        partition: Partition = "flops",
    ) -> None:
        options = {"schedule": schedule, "chunks": chunks, "partition": partition}
        if reason := self.refused_options(options):
            raise ValueError(f"torch.pipeline: {reason}")
        self.model = PipelineModel(workload, layout, mesh, device, options)
        self.module = self.model.module
        self.optimizer = RecipeOptimizer(self.module, workload)

    def train_step(self, batch: Batch) -> StepOutput:
        self.optimizer.clear_gradients()
        learning_rate = self.optimizer.learning_rate
        loss_sum, num_tokens = self.model.forward_backward(batch)
        with phase("reduce"):
            self.reduce()
        with phase("optimizer"):
            update = self.optimizer.step(tracks_norm=self.tracks_gradient_norm, norm_of=self.model.norm)
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=update.gradient_norm,
            skipped=update.skipped,
            learning_rates=(learning_rate,),  # a rank may hold no parameters, and so no groups
        )

    def reduce(self) -> None:
        """What several ranks have made of a gradient is summed."""
        self.model.reduce()

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        return self.model.evaluate(batch)

    def full_gradients(self) -> dict[str, Tensor]:
        return self.model.whole(self.optimizer.unclipped_gradients())

    def full_parameters(self) -> dict[str, Tensor]:
        return self.model.whole(self.optimizer.full_parameters(self.module))

    def full_buffers(self) -> dict[str, Tensor]:
        return self.model.whole(self.model.buffers())

    def facts(self) -> Mapping[str, str]:
        return self.model.facts()

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": self.optimizer.live_gradients(),
            "optimizer_states": self.optimizer.state_tensors(),
            "communication_buffers": self.model.received(),
        }
