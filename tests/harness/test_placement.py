"""On which node each rank sits."""

from __future__ import annotations

import pytest

from harness.layout import Layout
from harness.placement import seats
from harness.topology import Placement, Topology


def nodes(layout: Layout, placement: Placement, num_nodes: int = 2) -> list[int]:
    return list(seats(layout, Topology.of(layout.world_size, num_nodes, placement=placement)).node_of_rank)


def test_contiguous_fills_nodes_and_scattered_deals_out() -> None:
    assert nodes(Layout(data=6), "contiguous") == [0, 0, 0, 1, 1, 1]
    assert nodes(Layout(data=6), "scattered") == [0, 1, 0, 1, 0, 1]


def test_groups_of_an_axis_lie_inside_nodes() -> None:
    layout = Layout(data=4, shard=2, tensor=2)
    # rank = 2 data + tensor; shard groups are {0 2} {1 3} {4 6} {5 7}.
    assert nodes(layout, "tensor_inside_node", 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert nodes(layout, "shard_group_inside_node", 4) == [0, 1, 0, 1, 2, 3, 2, 3]
    for placement, axis in (("tensor_inside_node", "tensor"), ("shard_group_inside_node", "shard")):
        placed = seats(layout, Topology.of(8, 4, placement=placement))
        assert all(placed.on_one_node(group) for group in layout.groups(axis))  # type: ignore[arg-type]
        assert [placed.node_of_rank.count(node) for node in range(4)] == [2, 2, 2, 2]
    assert not seats(layout, Topology.of(8, 4)).on_one_node((0, 2))


def test_ranks_by_node_and_their_places_there() -> None:
    placed = seats(Layout(data=4), Topology.of(4, 2, placement="scattered"))
    assert placed.by_node((0, 1, 2, 3)) == ((0, 2), (1, 3))
    assert placed.by_node((1, 3)) == ((1, 3),)
    assert placed.by_node(()) == ()
    assert [placed.local_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert placed.on_one_node((1, 3))
    assert placed.on_one_node(())


@pytest.mark.parametrize(
    ("layout", "placement", "message"),
    [
        (Layout(tensor=4), "tensor_inside_node", "tensor groups of 4 ranks do not fit nodes of 2"),
        (Layout(data=2, tensor=3), "tensor_inside_node", None),
        (Layout(data=3, tensor=2), "tensor_inside_node", "tensor groups of 2 ranks do not fit nodes of 3"),
        (Layout(data=4), "shard_group_inside_node", "shard groups of 4 ranks do not fit nodes of 2"),
        (Layout(data=4, shard=2), "shard_group_inside_node", None),
    ],
)
def test_degrees_that_do_not_fit_the_nodes_are_refused(
    layout: Layout, placement: Placement, message: str | None
) -> None:
    if message is None:
        assert len(nodes(layout, placement)) == layout.world_size
        return
    with pytest.raises(ValueError, match=f"^placement {placement}: {message}$"):
        nodes(layout, placement)


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="layout data=3 needs 3 ranks, topology 1x2 has 2"):
        seats(Layout(data=3), Topology(ranks_per_node=2))
