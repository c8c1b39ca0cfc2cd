"""Reduce-scatter and all-gather of the sharded optimizer in two levels (parts/hierarchy.py), over the process group.
N nodes of R ranks; the rank at place l of a node owns shard (n, l) of node n.

    reduce-scatter    1 inside   to place l go this rank's pieces of all (., l): N of them; l sums them in rank order
                      2 across   to node n goes the sum of (n, l), which its owner sums in node order
    all-gather        1 across   (., l) come together at place l of each node
                      2 inside   each place has its N shards for the others

A node's link carries (N-1)/N of the payload each time, whatever R.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.implementation import CollectiveObserver
from impls.native.parts import ordered_sum
from impls.native.parts.collectives import BackgroundCollectives
from impls.native.parts.gradient_shards import Flat, ProcessGroupShards
from impls.native.parts.hierarchy import Levels
from impls.native.parts.parameter_gathers import ProcessGroupGathers


class HierarchicalShards(ProcessGroupShards):
    """See GradientShards. `group` are all ranks of both levels."""

    def __init__(
        self,
        flats: Sequence[Flat],
        group: dist.ProcessGroup,
        levels: Levels,
        device: torch.device,
        *,
        observer: CollectiveObserver | None = None,
    ) -> None:
        super().__init__(flats, group, device, observer=observer)
        self._levels = levels

    def _begin(self, index: int, own: Tensor, into: Tensor, *, add: bool) -> tuple[list[Any], list[Tensor]]:
        flat, (inside, across, _) = self._flats[index], self._levels
        landings = self._landings(flat, into, num_pieces=(inside.size() - 1) * across.size(), takes_one=False)
        # The sum of this rank's own shard comes into its place among the gradients: nobody else needs what is there.
        total = flat.shard(own, self._rank)
        return [self._background.start(partial(self._sum, flat, own, landings))], [total]

    def _sum(self, flat: Flat, own: Tensor, landings: Sequence[Tensor]) -> None:
        (inside, across, columns), num_nodes = self._levels, self._levels.across.size()
        place, node = inside.rank(), across.rank()
        peers = [peer for peer in range(inside.size()) if peer != place]
        works: list[Any] = []
        for peer in [*peers[place:], *peers[:place]]:  # each to another one first
            works += [
                dist.isend(flat.shard(own, owner), group=inside, group_dst=peer, tag=tag)
                for tag, owner in enumerate(columns[peer])
            ]
        received = [landings[begin : begin + num_nodes] for begin in range(0, len(landings), num_nodes)]
        for peer, pieces in zip(peers, received, strict=True):
            works += [dist.irecv(piece, group=inside, group_src=peer, tag=tag) for tag, piece in enumerate(pieces)]
        _wait(works)
        sums = [flat.shard(own, owner) for owner in columns[place]]
        for number, total in enumerate(sums):
            shares = [pieces[number] for pieces in received]
            ordered_sum.write([*shares[:place], total, *shares[place:]], total, add=False)
        others = [other for other in range(num_nodes) if other != node]
        works = [dist.isend(sums[other], group=across, group_dst=other) for other in others]
        shares = list(landings[: num_nodes - 1])
        works += [dist.irecv(share, group=across, group_src=other) for share, other in zip(shares, others, strict=True)]
        _wait(works)
        ordered_sum.write([*shares[:node], sums[node], *shares[node:]], sums[node], add=False)


class HierarchicalGathers(ProcessGroupGathers):
    """See ParameterGathers. `group` are all ranks of both levels."""

    def __init__(
        self,
        flats: Sequence[Flat],
        group: dist.ProcessGroup,
        levels: Levels,
        device: torch.device,
        *,
        keeps_full: bool,
    ) -> None:
        super().__init__(flats, group, device, keeps_full=keeps_full)
        self._levels = levels
        self._background = BackgroundCollectives("meshmark gathers")

    def close(self) -> None:
        super().close()
        self._background.close()

    def _begin(self, index: int) -> list[Any]:
        return [self._background.start(self._gather, self._flats[index], self._fulls[index])]

    def _gather(self, flat: Flat, full: Tensor) -> None:
        inside, across, columns = self._levels
        of_place = [[flat.shard(full, owner) for owner in column] for column in columns]
        own = of_place[inside.rank()]
        _wait([dist.broadcast(own[n], group=across, group_src=n, async_op=True) for n in range(across.size())])
        _wait(
            [
                dist.broadcast(shard, group=inside, group_src=place, async_op=True)
                for place, shards in enumerate(of_place)
                for shard in shards
            ]
        )


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
