"""Placement: on which node each rank of a layout sits.

2 nodes of 2 ranks, data=2 tensor=2           node 0        node 1
contiguous, tensor_inside_node                0 1           2 3       tensor groups {0 1} {2 3}
scattered                                     0 2           1 3
shard_group_inside_node                       0 2           1 3       shard groups  {0 2} {1 3}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.layout import Axis, Layout
from harness.topology import Placement, Topology

_AXIS_INSIDE: Mapping[Placement, Axis] = {"tensor_inside_node": "tensor", "shard_group_inside_node": "shard"}


@dataclass(frozen=True, kw_only=True)
class Seats:
    """`node_of_rank[rank]` is the node of that rank."""

    node_of_rank: tuple[int, ...]

    def on_one_node(self, ranks: Iterable[int]) -> bool:
        return len({self.node_of_rank[rank] for rank in ranks}) <= 1

    def by_node(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Of `ranks` those on each node that has any, in their order; nodes by number."""
        nodes = sorted({self.node_of_rank[rank] for rank in ranks})
        return tuple(tuple(rank for rank in ranks if self.node_of_rank[rank] == node) for node in nodes)

    def local_rank(self, rank: int) -> int:
        """Its place among the ranks of its node."""
        return self.node_of_rank[:rank].count(self.node_of_rank[rank])


def seats(layout: Layout, topology: Topology) -> Seats:
    """ValueError where the topology has another number of ranks, or where its nodes do not hold whole groups of the
    axis that is to lie inside them."""
    if topology.world_size != layout.world_size:
        raise ValueError(
            f"layout {layout} needs {layout.world_size} ranks, topology {topology} has {topology.world_size}"
        )
    size, num_ranks = topology.ranks_per_node, topology.world_size
    if topology.placement == "scattered":
        return Seats(node_of_rank=tuple(rank % topology.num_nodes for rank in range(num_ranks)))
    axis = _AXIS_INSIDE.get(topology.placement, "world")
    groups = layout.groups(axis)
    if axis != "world" and size % len(groups[0]):
        raise ValueError(
            f"placement {topology.placement}: {axis} groups of {len(groups[0])} ranks do not fit nodes of {size}"
        )
    node_of_rank = [0] * num_ranks
    for place, rank in enumerate(rank for group in groups for rank in group):
        node_of_rank[rank] = place // size
    return Seats(node_of_rank=tuple(node_of_rank))
