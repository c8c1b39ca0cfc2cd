"""Sums of a rank's shards of gradients over its replicas, the ranks of other groups that own the same shards: each is
under way as soon as the rank's own group has summed the shard, while backward goes on. Where groups lie inside nodes
these sums alone cross a slow link, and the sooner the first one leaves, the more of them backward hides.

    backward       block 3 | block 2 | block 1 | root
    in the group            sum of 3| of 2    | of 1    | of the root          parts/gradient_shards.py
    replicas                         all of 3 | all of 2 | all of 1 | all of the root

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", section 3.2.2, hybrid sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from impls.native.parts import hierarchy
from impls.native.parts.collectives import BackgroundCollectives, Handle
from impls.native.parts.hierarchy import Levels


class ReplicaSums:
    """Of `shards`, each (num_shard_elements,), in place, over `group`, or over both of its `levels`. Every rank starts
    them in the same order, from whatever thread."""

    def __init__(self, shards: Sequence[Tensor], group: dist.ProcessGroup, levels: Levels | None) -> None:
        self._shards, self._group, self._levels = shards, group, levels
        self._background = BackgroundCollectives("meshmark replica sums")
        self._handles: dict[int, Handle] = {}

    def start(self, index: int) -> None:
        """The shard holds the sum over this rank's own group."""
        shard = self._shards[index]
        if not shard.numel():
            return
        if self._levels is not None:
            self._handles[index] = self._background.start(hierarchy.all_reduce, shard, self._levels)
            return
        work: Any = dist.all_reduce(shard, group=self._group, async_op=True)
        self._handles[index] = work

    def wait(self, index: int) -> None:
        """Returns once the shard, which has been started, holds the sum over all replicas."""
        if self._shards[index].numel():
            self._handles.pop(index).wait()

    def close(self) -> None:
        self._handles.clear()
        self._background.close()
