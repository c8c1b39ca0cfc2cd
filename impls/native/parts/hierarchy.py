"""A group that spans several nodes, taken as two levels: the ranks of one node, and those that have the same place on
each node. N nodes of R ranks, W = N R:

                  inside: {0 1} {2 3}                across: {0 2} {1 3}

    node 0        | a0 | a1 |   | b0 | b1 |          1 reduce inside       rank 0: a0 + b0    rank 1: a1 + b1
    node 1        | c0 | c1 |   | d0 | d1 |          2 all-reduce across   ranks 0 and 2: all of 0; 1 and 3: all of 1
                  rank 0      rank 1                 3 gather inside

A ring over all ranks puts 2(W-1)/W of the payload on a node's link, or more where neighbours of the ring lie apart;
this puts 2(N-1)/N on it. A rank sends as much in all: 2(W-1)/W.

The three phases are those of Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour"; that each
rank of a node takes a part of it across is Cho et al. 2019, "BlueConnect: Decomposing All-Reduce for Deep Learning on
Heterogeneous Network Hierarchy".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness import traffic
from harness.layout import Axis, Layout
from harness.mesh import Mesh
from harness.placement import Seats
from harness.traffic import Traffic
from impls.native.parts import ordered_sum

Hierarchical = Literal["auto", "on", "off"]


class Levels(NamedTuple):
    """A rank's groups: the ranks of its node, and those that have its place on each node. `columns[place]` are
    those of that place, in the order of their group, as places in the whole group."""

    inside: dist.ProcessGroup
    across: dist.ProcessGroup
    columns: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return f"{self.across.size()} nodes of {self.inside.size()} ranks"


def flat_because(layout: Layout, seats: Seats, axis: Axis, device: torch.device) -> str | None:
    """Why the groups along `axis` gain nothing by two levels, or None."""
    if device.type != "cpu":
        return f"tensors on {device.type} are reduced by their own library, which knows the nodes"
    sizes = {tuple(len(node) for node in seats.by_node(group)) for group in layout.groups(axis)}
    if any(len(of_group) == 1 for of_group in sizes):
        return "the group lies on one node"
    if any(len(set(of_group)) > 1 for of_group in sizes):
        return "its nodes have different numbers of ranks"
    if any(of_group[0] == 1 for of_group in sizes):
        return "a node has one of its ranks"
    return None


def is_chosen(hierarchical: Hierarchical, layout: Layout, seats: Seats, axis: Axis, device: torch.device) -> bool:
    """Whether the groups along `axis` are taken as two levels."""
    return hierarchical != "off" and flat_because(layout, seats, axis, device) is None


def fallback(hierarchical: Hierarchical, mesh: Mesh, axis: Axis, device: torch.device) -> str | None:
    """Why two levels that are asked for are not taken, or None."""
    return flat_because(mesh.layout, mesh.seats, axis, device) if hierarchical == "on" else None


def facts(levels: Levels | None, fallback: str | None) -> dict[str, str]:
    """What an implementation tells of them."""
    if fallback is not None:
        return {"hierarchical": "off", "hierarchical_fallback": fallback}
    return {} if levels is None else {"levels": str(levels)}


def levels(mesh: Mesh, axis: Axis) -> Levels:
    """Two groups of this rank's along `axis`, for one kind of collective. Collective over all ranks."""
    ranks = mesh.ranks(axis)
    by_node = mesh.seats.by_node(ranks)
    columns = tuple(tuple(sorted(ranks.index(rank) for rank in column)) for column in zip(*by_node, strict=True))
    inside, across = mesh.levels(axis)
    return Levels(inside, across, columns)


def all_reduce(buffer: Tensor, levels: Levels) -> None:
    """Sums `buffer` (elements,) over all ranks of both levels, in place."""
    inside, rank, num_ranks = levels.inside, levels.inside.rank(), levels.inside.size()
    chunks = list(buffer.tensor_split(num_ranks))
    own = chunks[rank]
    staging = torch.empty((num_ranks - 1) * own.numel(), dtype=buffer.dtype, device=buffer.device)
    landings = list(staging.view(num_ranks - 1, own.numel()))
    peers = [(rank + distance) % num_ranks for distance in range(1, num_ranks)]  # each to another one first
    works: list[Any] = [
        dist.isend(chunks[peer], group=inside, group_dst=peer) for peer in peers if chunks[peer].numel()
    ]
    if own.numel():
        sources = [peer for peer in range(num_ranks) if peer != rank]
        works += [
            dist.irecv(landing, group=inside, group_src=peer) for landing, peer in zip(landings, sources, strict=True)
        ]
    _wait(works)
    if own.numel():
        ordered_sum.write([*landings[:rank], own, *landings[rank:]], own, add=False)
        dist.all_reduce(own, group=levels.across)
    _wait(
        [
            dist.broadcast(chunk, group=inside, group_src=owner, async_op=True)
            for owner, chunk in enumerate(chunks)
            if chunk.numel()
        ]
    )


def all_reduce_traffic(by_node: Sequence[Sequence[int]], num_bytes: int) -> Traffic:
    """Of `all_reduce` over the ranks of these nodes."""
    chunk_bytes = -(-num_bytes // len(by_node[0]))
    return traffic.total(
        (
            *(traffic.exchange(node, chunk_bytes) for node in by_node),
            *(traffic.all_reduce(column, chunk_bytes) for column in zip(*by_node, strict=True)),
            *(traffic.all_gather_by_trees(node, chunk_bytes) for node in by_node),
        )
    )


def reduce_scatter_traffic(by_node: Sequence[Sequence[int]], shard_bytes: int) -> Traffic:
    """Of shards that are summed inside each node, and these sums across (parts/hierarchical_exchange.py)."""
    return traffic.total(
        (
            *(traffic.exchange(node, len(by_node) * shard_bytes) for node in by_node),
            *(traffic.exchange(column, shard_bytes) for column in zip(*by_node, strict=True)),
        )
    )


def all_gather_traffic(by_node: Sequence[Sequence[int]], shard_bytes: int) -> Traffic:
    """Of shards that are gathered across, and these inside each node."""
    return traffic.total(
        (
            *(traffic.all_gather_by_trees(column, shard_bytes) for column in zip(*by_node, strict=True)),
            *(traffic.all_gather_by_trees(node, len(by_node) * shard_bytes) for node in by_node),
        )
    )


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
