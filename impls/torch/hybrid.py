"""torch's pipeline in several replicas: each rank's stages under torch.distributed.pipelining, and when the schedule is
through their gradients summed over the data axis.

The summing is not DistributedDataParallel's, whose hooks do not see the weights' part of a backward that is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.implementation import Implementation, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer
from harness.parameters import LogicalParameter, MemoryCategory
from harness.workload import Batch, Workload
from impls.torch.parts import pipeline_costs, pipeline_limits
from impls.torch.parts.flat_sum import sum_gradients
from impls.torch.parts.pipeline_model import PipelineModel
from impls.torch.parts.pipeline_plan import Partition, plan
from impls.torch.parts.pipeline_schedules import ScheduleName, refused


class TorchHybrid(Implementation):
    """A data and a pipeline degree; the options are those of torch.pipeline."""

    strategy = "hybrid"
    makes_gradients = True

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        return refused(options.get("schedule", "1f1b"), options.get("chunks", 1))

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if layout.tensor > 1 or layout.shard not in (None, 1):
            return f"replicas of a pipeline take a data and a pipeline degree, got {layout}"
        if workload.leaves_parameters_unused:
            return "a parameter that some ranks leave unused would put the sums over the data axis out of step"
        return pipeline_limits.why_not(workload, layout, options) or workload.fits_data_degree(layout.data)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return pipeline_costs.memory_bytes(plan(workload, layout, options), workload, parameters)

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        return pipeline_costs.wire_bytes(plan(workload, layout, options), workload, parameters, data_degree=layout.data)

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
            raise ValueError(f"torch.hybrid: {reason}")
        self.data_group = mesh.group("data")
        self.model = PipelineModel(workload, layout, mesh, device, options)
        self.module = self.model.module
        self.optimizer = RecipeOptimizer(self.module, workload)

    def train_step(self, batch: Batch) -> StepOutput:
        self.optimizer.clear_gradients()
        learning_rate = self.optimizer.learning_rate
        loss_sum, num_tokens = self.model.forward_backward(batch)
        with phase("reduce"):
            if self.data_group.size() > 1:
                sum_gradients(self.optimizer.parameters, self.data_group)
            self.model.sum_shared()
        with phase("optimizer"):
            update = self.optimizer.step(tracks_norm=self.tracks_gradient_norm, norm_of=self.model.norm)
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=update.gradient_norm,
            skipped=update.skipped,
            learning_rates=(learning_rate,),  # a rank may hold no parameters, and so no groups
        )

    def full_gradients(self) -> dict[str, Tensor]:
        return self.model.whole(self.optimizer.unclipped_gradients())

    def full_parameters(self) -> dict[str, Tensor]:
        return self.model.whole(self.optimizer.full_parameters(self.module))

    def full_buffers(self) -> dict[str, Tensor]:
        return self.model.whole(self.model.buffers())

    def facts(self) -> Mapping[str, str]:
        return {"torch_schedule": self.model.schedule_class}

    def replicated_tensors(self) -> Iterable[Tensor]:
        yield from self.module.parameters()
        yield from self.model.buffers().values()
        yield from self.optimizer.state_tensors()

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": self.optimizer.live_gradients(),
            "optimizer_states": self.optimizer.state_tensors(),
            "communication_buffers": self.model.received(),
        }
