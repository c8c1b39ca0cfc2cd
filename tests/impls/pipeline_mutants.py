"""Deliberately broken pipelines: each class has one fault of the kind that trains on without an error, and each must
fail the parity gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from harness.chain import Border
from harness.implementation import StepOutput
from harness.workload import Batch
from impls.native.parts.pipeline_executor import StageRun
from impls.native.parts.pipeline_model import PipelineStages
from impls.native.pipeline import NativePipeline


class _Mutant(NativePipeline):
    @property
    def stages(self) -> PipelineStages:
        assert isinstance(self.model, PipelineStages)
        return self.model


class ClippedByStage(_Mutant):
    """Each rank clips by the norm of its own stages, and still tells the norm of all."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._norm_over_all = self.stages.norm_over_slices
        self.stages.norm_over_slices = lambda own: own  # type: ignore[method-assign]

    def train_step(self, batch: Batch) -> StepOutput:
        output = super().train_step(batch)
        assert output.gradient_norm is not None
        return replace(output, gradient_norm=self._norm_over_all(output.gradient_norm))


class LabelsOfAnother(_Mutant):
    """Outputs meet the labels of the next micro-batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        run_of = self.stages._run_of

        def mismatched(
            stage: int, batch: Batch, losses: list[Tensor], borders: Sequence[tuple[Border, ...]]
        ) -> StageRun:
            given = batch.micro_batches
            paired = (
                replace(one, targets=other.targets) for one, other in zip(given, (*given[1:], given[0]), strict=True)
            )
            return run_of(stage, replace(batch, micro_batches=tuple(paired)), losses, borders)

        self.stages._run_of = mismatched  # type: ignore[method-assign]


class DividedAgain(_Mutant):
    """From the second call on, gradients are divided by the number of micro-batches as well."""

    _num_calls = 0

    def train_step(self, batch: Batch) -> StepOutput:
        self._num_calls += 1
        factor = len(batch.micro_batches) if self._num_calls > 1 else 1
        return super().train_step(replace(batch, global_num_tokens=batch.global_num_tokens * factor))


class TiesNotSummed(_Mutant):
    """Each stage steps its copy of a tied parameter by its own contribution."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stages.sum_partial = lambda kinds, gradients: None  # type: ignore[method-assign]


class TiesCountedTwice(_Mutant):
    """A tied parameter counts in the norm of each rank that holds it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stages.counts = lambda kinds: True  # type: ignore[method-assign]


class LastBackwardDropped(_Mutant):
    """The last stage does not go backward from the last micro-batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        run_of = self.stages._run_of

        def forgetful(
            stage: int, batch: Batch, losses: list[Tensor], borders: Sequence[tuple[Border, ...]]
        ) -> StageRun:
            run = run_of(stage, batch, losses, borders)
            forward = run.forward

            def forward_only(micro_batch: int, inputs: list[Tensor]) -> list[Tensor]:
                outputs = forward(micro_batch, inputs)
                is_last = micro_batch == len(batch.micro_batches) - 1 and not run.outputs
                return [output.detach() for output in outputs] if is_last else outputs

            return replace(run, forward=forward_only)

        self.stages._run_of = forgetful  # type: ignore[method-assign]


class WeightsDropped(_Mutant):
    """What each step puts off first is never done."""

    def train_step(self, batch: Batch) -> StepOutput:
        take = self._training_task.take_put_off
        dropped: list[Callable[[], None]] = []

        def take_all_but_the_first() -> list[Callable[[], None]]:
            taken = take()
            if dropped:
                return taken
            dropped.extend(taken)
            return []

        self._training_task.take_put_off = take_all_but_the_first  # type: ignore[method-assign]
        output = super().train_step(batch)
        self._training_task.take_put_off = take  # type: ignore[method-assign]
        assert dropped
        return output
