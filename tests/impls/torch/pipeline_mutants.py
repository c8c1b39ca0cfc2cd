"""torch.pipeline, broken on purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from harness.implementation import StepOutput
from harness.optimizer import global_norm, norm_over_ranks
from harness.workload import Batch
from impls.torch.pipeline import TorchPipeline


class ClipsEachStage(TorchPipeline):
    """By the norm of its own gradients."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.model.norm = lambda gradients: global_norm(list(gradients.values()))  # type: ignore[method-assign]


class CountsTiesTwice(TorchPipeline):
    """In the norm."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        group = self.model._group

        def norm(gradients: Mapping[str, Tensor]) -> Tensor:
            return norm_over_ranks(global_norm(list(gradients.values())), group)

        self.model.norm = norm  # type: ignore[method-assign]


class LeavesTiesApart(TorchPipeline):
    """Each rank steps its copy by its own part of the gradient."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.model.reduce = lambda: None  # type: ignore[method-assign]


class DividesAgain(TorchPipeline):
    """As torch does by default: by the number of micro-batches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.model._schedule.scale_grads = True


class MixesUpLabels(TorchPipeline):
    """A micro-batch's outputs meet the labels of the next one."""

    def train_step(self, batch: Batch) -> StepOutput:
        first, *others = batch.micro_batches
        following = (*others, first)
        mixed = (replace(one, targets=next_.targets) for one, next_ in zip(batch.micro_batches, following, strict=True))
        return super().train_step(replace(batch, micro_batches=tuple(mixed)))
