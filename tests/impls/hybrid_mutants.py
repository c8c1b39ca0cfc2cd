"""Deliberately broken products of degrees: each class has one fault where two axes meet, of the kind that trains on
without an error, and each must fail the parity gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harness.implementation import StepOutput
from harness.workload import Batch
from impls.native.ddp import NativeDataParallel
from impls.native.hybrid import NativeHybrid
from impls.native.zero import NativeShardedOptimizer


class _Mutant(NativeHybrid):
    @property
    def along_data(self) -> Any:
        assert isinstance(self._along_data, NativeShardedOptimizer | NativeDataParallel)
        return self._along_data


class PartialSummedTooLate(_Mutant):
    """What several stages or slices make together (a tie, a norm's weight) is summed when shards have been taken from
    it and stepped. (Before the step it would be in time: shards of the same flat lie alike everywhere.)"""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        model = self.along_data.model
        self._sum_partial, model.sum_partial = model.sum_partial, lambda kinds, gradients: None

    def train_step(self, batch: Batch) -> StepOutput:
        output = super().train_step(batch)
        for bucket in self.along_data.buckets:
            self._sum_partial(self.along_data._kinds(bucket), bucket.shard_gradients.clone())
        return output


class NormOfOneSlice(_Mutant):
    """The norm is that of this rank's own slice, summed over shards alone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

        def own_alone(own: Tensor) -> Tensor:
            return own

        self.along_data.model.norm_over_slices = own_alone


class NormOfOneShard(_Mutant):
    """The norm is summed over slices, and not over the shards of each."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.along_data.memory.norm_over_shards = lambda own: own
