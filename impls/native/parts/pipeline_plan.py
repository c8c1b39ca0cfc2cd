"""A pipeline as its ranks agree on it, and any rank's part of it in one process, without values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from harness.workload import Batch, Workload, in_compute_precision
from impls.native.parts.counting_exchange import CountingExchange
from impls.native.parts.pipeline_messages import HeldMessages, Messages
from impls.native.parts.pipeline_model import PipelineStages
from impls.native.parts.rank_model import RankModel
from impls.native.parts.schedules import Schedule
from impls.native.parts.tensor_dry_run import largest_batch, slice_without_values

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """`stages` are the blocks of each stage under `schedule`, in one of `data_degree` replicas, of whose layers
    `tensor_degree` ranks have slices."""

    workload: Workload
    schedule: Schedule
    stages: tuple[range, ...]
    data_degree: int = 1
    tensor_degree: int = 1
    cuts_sequence: bool = False

    @property
    def num_ranks(self) -> int:
        """Along the pipeline."""
        return self.schedule.num_ranks

    def largest_batch(self) -> Batch:
        return largest_batch(self.workload, self.data_degree)

    def whole(self, module: nn.Module | None = None) -> tuple[RankModel, CountingExchange]:
        """What the first tensor rank has of `module`, by itself the model on the meta device; and what counts its
        exchanges."""
        if self.tensor_degree > 1:
            return slice_without_values(
                self.workload,
                self.tensor_degree,
                data_degree=self.data_degree,
                cuts_sequence=self.cuts_sequence,
                module=module,
            )
        if module is None:
            module = in_compute_precision(self.workload, self.workload.model_without_memory())
        device = next((parameter.device for parameter in module.parameters()), _META)
        return RankModel(self.workload, device, "a pipeline", module=module), CountingExchange(1)

    def part(self, rank: int, whole: RankModel, *, messages: type[Messages] = HeldMessages) -> PipelineStages:
        """The stages of `whole` that the pipeline's `rank` has."""
        return PipelineStages(
            whole,
            None,
            "a pipeline",
            rank=rank,
            stages=self.stages,
            schedule=self.schedule,
            make_ties=lambda ranks: None,
            messages=messages(None, whole.device),
        )
