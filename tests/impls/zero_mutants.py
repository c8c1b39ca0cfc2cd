"""Deliberately broken sharded optimizers: each class has one fault of the kind that trains on without an error, and
each must fail the parity gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.implementation import StepOutput
from harness.workload import Batch
from impls.native.zero import NativeShardedOptimizer


class NoReduceScatter(NativeShardedOptimizer):
    """Every rank steps its shard by its own gradients alone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        exchange, group = self.memory.exchange, self.shard_group

        def keep(index: int, into: Tensor, *, add: bool, **_: Any) -> None:
            own = exchange.own(index).tensor_split(group.size())[group.rank()]
            into.add_(own) if add else into.copy_(own)

        exchange.start = keep  # type: ignore[method-assign]


class PaddingInNorm(NativeShardedOptimizer):
    """The padding at the end of a slot holds what its last user left there, and counts in the norm."""

    def _global_norm(self) -> Tensor:
        for bucket in self.buckets:
            padding = bucket.shard_gradients[bucket.own_gradients.numel() :]
            padding.fill_(0.5)
        whole = torch.cat([bucket.shard_gradients.double() for bucket in self.buckets])
        return self.memory.norm_over_shards(torch.linalg.vector_norm(whole))


class EverythingDecays(NativeShardedOptimizer):
    """Flattening has lost the decay groups."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for bucket in self.buckets:
            for run in bucket.optimizer._runs:
                run.weight_decay = self.workload.training.weight_decay


class LastMicroBatchOnly(NativeShardedOptimizer):
    """Each micro-batch's sum takes the place of the one before it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        start = self.memory.exchange.start
        self.memory.exchange.start = (  # type: ignore[method-assign]
            lambda index, into, *, add, then=None: start(index, into, add=False, then=then)
        )


class ReducedInTheFirst(NativeShardedOptimizer):
    """Each bucket is reduced once, after the first micro-batch; what comes later is lost."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        start = self.memory.exchange.start
        self.memory.exchange.start = (  # type: ignore[method-assign]
            lambda index, into, *, add, then=None: None if add else start(index, into, add=False, then=then)
        )


class MomentsShiftedByPadding(NativeShardedOptimizer):
    """Moments are kept where the parameters lie with one element of padding before them."""

    def train_step(self, batch: Batch) -> StepOutput:
        for bucket in self.buckets:
            for moment in bucket.optimizer.moments:
                moment.copy_(moment.roll(1))
        return super().train_step(batch)


class NormOfOwnShard(NativeShardedOptimizer):
    """Every rank clips by the norm of its own shard."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.memory.norm_over_shards = lambda own: own  # type: ignore[method-assign]


class StaleShards(NativeShardedOptimizer):
    """Parameters are gathered from their owners as they were before the update."""

    def _step(self, learning_rate: float) -> tuple[Tensor | None, bool]:
        before = [self.memory.gathers.shard(index).clone() for index in range(len(self.buckets))]
        output = super()._step(learning_rate)
        if self.num_updates == 2:
            for index, old in enumerate(before):
                self.memory.gathers.shard(index).copy_(old)
        return output


class UnusedDecays(NativeShardedOptimizer):
    """A parameter that nobody used is stepped with a gradient of zero."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for bucket in self.buckets:
            bucket.settle = lambda: None  # type: ignore[method-assign]


class ReplicasApart(NativeShardedOptimizer):
    """Under hybrid sharding the groups do not sum their shards."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.replicas = None
