"""Deliberately broken two levels: each class has one fault of the kind that trains on without an error, and each must
fail the parity gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from impls.native.ddp import NativeDataParallel
from impls.native.parts import hierarchy
from impls.native.parts.bucket_sums import ProcessGroupSums
from impls.native.parts.gradient_shards import Flat
from impls.native.parts.hierarchical_exchange import HierarchicalGathers, HierarchicalShards
from impls.native.zero import NativeShardedOptimizer


def _sums(of: NativeDataParallel) -> ProcessGroupSums:
    assert isinstance(of.sums, ProcessGroupSums)
    return of.sums


class NotAcross(NativeDataParallel):
    """Every node keeps the sum of its own ranks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.levels is not None
        inside = self.levels._replace(across=self.mesh_alone)
        _sums(self)._composed = lambda buffer: hierarchy.all_reduce(buffer, inside)

    @property
    def mesh_alone(self) -> Any:
        import torch.distributed as dist

        return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


class NotInside(NativeDataParallel):
    """Each rank sums its chunk across nodes, and its neighbours' shares are lost."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        import torch.distributed as dist

        super().__init__(*arguments, **options)
        levels = self.levels
        assert levels is not None
        _sums(self)._composed = lambda buffer: dist.all_reduce(buffer, group=levels.across)


class NoGatherInside(NativeDataParallel):
    """A rank has the sum of its own chunk and of no other."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        levels = self.levels
        assert levels is not None

        def all_reduce(buffer: Tensor) -> None:
            own = buffer.clone()
            hierarchy.all_reduce(own, levels)
            chunks = zip(buffer.tensor_split(2), own.tensor_split(2), strict=True)
            mine, total = list(chunks)[levels.inside.rank()]
            mine.copy_(total)

        _sums(self)._composed = all_reduce


class ShardsNotAcross(NativeShardedOptimizer):
    """A shard is the sum of its owner's node."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        exchange = self.memory.exchange
        assert isinstance(exchange, HierarchicalShards)
        levels, whole = exchange._levels, exchange._sum

        def sum_inside(flat: Flat, own: Tensor, landings: list[Tensor]) -> None:
            before = own.clone()
            whole(flat, own, landings)
            mine = levels.columns[levels.inside.rank()][levels.across.rank()]
            flat.shard(own, mine).copy_(2 * flat.shard(before, mine))

        exchange._sum = sum_inside  # type: ignore[method-assign,assignment]


class ShardsOfTheWrongNode(NativeShardedOptimizer):
    """The owner of a shard takes the one of its place on the other node."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        exchange = self.memory.exchange
        assert isinstance(exchange, HierarchicalShards)
        levels = exchange._levels
        exchange._levels = levels._replace(columns=tuple(column[::-1] for column in levels.columns))


class GathersNotInside(NativeShardedOptimizer):
    """The shards of a rank's neighbours stay as they were."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        gathers = self.memory.gathers
        assert isinstance(gathers, HierarchicalGathers)
        whole, levels = gathers._gather, gathers._levels

        def gather(flat: Flat, full: Tensor) -> None:
            whole(flat, full)
            for owner in levels.columns[1 - levels.inside.rank()]:
                flat.shard(full, owner).zero_()

        gathers._gather = gather  # type: ignore[method-assign]
