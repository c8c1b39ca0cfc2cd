"""Two degrees at a time, as torch's own pieces go together:

data x tensor      parallelize_module, then fully_shard: a shard of a slice of each layer (parts/sharded_slices.py)
data x pipeline    replicas of the stages of torch.distributed.pipelining (parts/pipeline_model.py), whose gradients
                   are summed when the schedule is through: the hooks of DistributedDataParallel do not see the
                   weights' part of a backward that is split
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.implementation import Prediction
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer
from harness.parameters import LogicalParameter, MemoryCategory
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Workload
from impls.torch.parts import pipeline_costs, pipeline_limits, sharding_limits, slice_costs
from impls.torch.parts.flat_sum import sum_gradients
from impls.torch.parts.pipeline_model import PipelineModel
from impls.torch.parts.pipeline_plan import Partition, plan
from impls.torch.parts.pipeline_schedules import ScheduleName
from impls.torch.parts.tensor_slices import local_part
from impls.torch.pipeline import TorchPipeline


class TorchHybrid(TorchPipeline):
    """A step as torch.pipeline takes it, over more than one axis. `schedule`, `chunks` and `partition` are that one's,
    and say nothing without a pipeline."""

    strategy = "hybrid"

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if layout.tensor > 1 and layout.pipeline > 1:
            return f"torch.hybrid takes a data degree with a tensor or a pipeline degree, got {layout}"
        if workload.leaves_parameters_unused:
            return "a parameter that some ranks leave unused would put the sums over the data axis out of step"
        if layout.tensor > 1:
            return _why_no_slices(workload, layout)
        if workload.depends_on_chunks and workload.buffer_bytes():
            return "statistics of batches would have to be those of the first replica, which nobody sends here"
        if layout.shard not in (None, 1):
            return f"replicas of a pipeline shard nothing along the data axis, got {layout}"
        return pipeline_limits.why_not(workload, layout, options) or workload.fits_data_degree(layout.data)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        """Of the rank that needs most; of slices that is the first."""
        if layout.tensor == 1:
            return super().predicted_memory(workload, parameters, layout, options)
        costs = slice_costs.slice_costs(workload, layout)
        return None if costs is None else slice_costs.memory_bytes(costs, workload, layout)

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        if layout.tensor == 1:
            planned = plan(workload, layout, options)
            return pipeline_costs.wire_bytes(planned, workload, parameters, data_degree=layout.data)
        costs = slice_costs.slice_costs(workload, layout)
        return None if costs is None else slice_costs.wire_bytes(costs, workload, layout)

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        if layout.tensor == 1:
            return super().predicted_traffic(workload, parameters, layout, seats, options)
        costs = slice_costs.slice_costs(workload, layout)
        return None if costs is None else slice_costs.traffic_of(costs, workload, layout)

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        if layout.tensor == 1:
            return super().unpredicted(workload, parameters, layout, options)
        reasons: dict[Prediction, str] = {"peak": "FSDP2 shards DTensors, which do not run on tensors without memory"}
        if slice_costs.slice_costs(workload, layout) is None:
            reasons["states"] = reasons["bytes"] = "the model does not run without values"
        return reasons

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
        if layout.tensor > 1:
            # Brings FSDP along: only ranks pay for it.
            from impls.torch.parts.sharded_slices import ShardedSlices

            self.model = slices = ShardedSlices(workload, layout, mesh, device)
            self.optimizer = RecipeOptimizer(slices.module, workload, stepped=slices.stepped)
        else:
            self.model = PipelineModel(workload, layout, mesh, device, options)
            self.optimizer = RecipeOptimizer(self.model.module, workload)
        self.module = self.model.module

    def reduce(self) -> None:
        if isinstance(self.model, PipelineModel) and self.data_group.size() > 1:
            sum_gradients(self.optimizer.parameters, self.data_group)
        super().reduce()

    def replicated_tensors(self) -> Iterable[Tensor]:
        """The buffers; replicas of a pipeline are the same in everything, of slices each data rank has other shards."""
        yield from self.model.buffers().values()
        if isinstance(self.model, PipelineModel):
            yield from self.module.parameters()
            yield from self.optimizer.state_tensors()

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {**super().memory_tensors(), "parameters": [local_part(p) for p in self.module.parameters()]}


def _why_no_slices(workload: Workload, layout: Layout) -> str | None:
    if layout.shard not in (None, layout.data):
        return f"fully_shard over slices shards over the whole data axis, got {layout}"
    if workload.precision.master is not None:
        return "parallelize_module keeps no fp32 masters"
    return (
        workload.fits_tensor_degree(layout.tensor)
        or sharding_limits.why_not(workload, 1)
        or workload.fits_data_degree(layout.data)
    )
