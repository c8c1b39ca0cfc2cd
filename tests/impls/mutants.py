"""Deliberately broken data parallel: each class has one fault of the kind that trains on without an error, and each
must fail the parity gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.evaluation import sum_losses
from harness.implementation import EvaluationOutput, StepOutput
from harness.workload import Batch
from impls.native.ddp import NativeDataParallel
from impls.native.parts.bucket_sums import BucketSums, Piece


def leave_out(sums: BucketSums, index: int) -> None:
    """Makes the sum of one bucket this rank's own share."""
    start, wait = sums.start, sums.wait
    sums.start = lambda i: None if i == index else start(i)  # type: ignore[method-assign]
    sums.wait = lambda i: [Piece(0, sums.own(i).numel(), sums.own(i))] if i == index else wait(i)  # type: ignore


def change_sums(sums: BucketSums, change: Callable[[Tensor], Tensor]) -> None:
    """Changes every sum before it is used."""
    wait = sums.wait
    sums.wait = lambda i: [Piece(a, b, change(values)) for a, b, values in wait(i)]  # type: ignore[method-assign]


class NoReduction(NativeDataParallel):
    """The reduction does nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for index in range(len(self.buckets)):
            leave_out(self.sums, index)


class DoubleAverage(NativeDataParallel):
    """The sum is divided by the number of ranks although the loss was divided by the global count."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        change_sums(self.sums, lambda values: values.div_(self.group.size()))


class RightWhileWatched(NativeDataParallel):
    """Reduces only while gradients are asked for: what is timed is not what is checked."""

    def train_step(self, batch: Batch) -> StepOutput:
        if not self.tracks_gradient_norm:
            for index in range(len(self.buckets)):
                leave_out(self.sums, index)
        return super().train_step(batch)


class MeanOfMeans(NativeDataParallel):
    """Every rank divides by its own count, then ranks are averaged alike."""

    def train_step(self, batch: Batch) -> StepOutput:
        own = sum(micro_batch.num_tokens for micro_batch in batch.micro_batches)
        return super().train_step(replace(batch, global_num_tokens=max(1, own) * self.group.size()))


class MissingBucket(NativeDataParallel):
    """One bucket is not reduced."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        leave_out(self.sums, 1)


class StaleBucket(NativeDataParallel):
    """Buckets keep the last step's gradients and the new ones are added."""

    def train_step(self, batch: Batch) -> StepOutput:
        for bucket in self.buckets:
            bucket.filled = _Sticky(segment.parameter.name for segment in bucket.plan.segments)
        return super().train_step(batch)


class _Sticky(set[str]):
    def clear(self) -> None:
        pass


class IdenticalData(NativeDataParallel):
    """Every rank trains on rank 0's share."""

    def train_step(self, batch: Batch) -> StepOutput:
        share = self.workload.batch(batch.step, data_rank=0, data_degree=self.group.size())
        return super().train_step(share)


class LastMicroBatchOnly(NativeDataParallel):
    """Only the last micro-batch's gradient reaches the step."""

    def train_step(self, batch: Batch) -> StepOutput:
        return super().train_step(replace(batch, micro_batches=batch.micro_batches[-1:]))


class ReducedTooEarly(NativeDataParallel):
    """The exchange starts with the first micro-batch and takes no later one in."""

    def train_step(self, batch: Batch) -> StepOutput:
        return super().train_step(replace(batch, micro_batches=batch.micro_batches[:1]))


class EverythingDecays(NativeDataParallel):
    """Flattening has lost the decay groups."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for bucket in self.buckets:
            for run in bucket.optimizer._runs:
                run.weight_decay = self.workload.training.weight_decay


class DriftingReplica(NativeDataParallel):
    """One rank's gradients differ from the others' in the ninth digit."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.group.rank() == 1:
            change_sums(self.sums, lambda values: values.mul_(1.0 + 1e-9))


class UnusedDecays(NativeDataParallel):
    """A parameter that nobody used is stepped with a gradient of zero."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for bucket in self.buckets:
            bucket._is_marked = lambda segment: False  # type: ignore[method-assign]


class OwnBuffers(NativeDataParallel):
    """Every rank keeps its own buffers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.buffers._places.clear()


class NeverClips(NativeDataParallel):
    """The norm is told, and not applied."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.workload = replace(self.workload, training=replace(self.workload.training, clip_norm=None))


class EvaluatesInTraining(NativeDataParallel):
    """The model is not put into evaluation mode."""

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        with torch.random.fork_rng(), torch.no_grad():
            return sum_losses(batch, self.model.loss_sum, self.device)


class EvaluationMovesStatistics(NativeDataParallel):
    """An evaluation comes after a forward that counts for BatchNorm's statistics."""

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        output = super().evaluate(batch)
        with torch.no_grad():
            self.module(batch.micro_batches[0].inputs)
        return output
