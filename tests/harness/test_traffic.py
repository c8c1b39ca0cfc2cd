"""Who sends what to whom, and what of it leaves a node."""

from __future__ import annotations

import pytest

from harness import traffic
from harness.layout import Layout
from harness.placement import seats
from harness.topology import Topology
from harness.traffic import Traffic
from harness.wire_bytes import wire_bytes

CONTIGUOUS = seats(Layout(data=4), Topology.of(4, 2))
SCATTERED = seats(Layout(data=4), Topology.of(4, 2, placement="scattered"))


def sent_by(sent: Traffic, rank: int) -> int:
    return sum(num_bytes for (here, _), num_bytes in sent.items() if here == rank)


def received_by(sent: Traffic, rank: int) -> int:
    return sum(num_bytes for (_, there), num_bytes in sent.items() if there == rank)


def test_a_ring_crosses_between_nodes_once_or_with_every_message() -> None:
    ring = traffic.ring((0, 1, 2, 3), 10)
    assert ring == {(0, 1): 10, (1, 2): 10, (2, 3): 10, (3, 0): 10}
    assert traffic.leaving_bytes(ring, CONTIGUOUS) == [10, 10]
    assert traffic.leaving_bytes(ring, SCATTERED) == [20, 20]
    assert traffic.ring((2,), 10) == {}


def test_pieces_for_everyone() -> None:
    pieces = traffic.exchange((0, 1, 2, 3), 5)
    assert len(pieces) == 12
    # Each of two ranks sends to both of the other node.
    assert traffic.leaving_bytes(pieces, CONTIGUOUS) == traffic.leaving_bytes(pieces, SCATTERED) == [20, 20]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_a_tree_brings_the_roots_bytes_to_each_once(num_ranks: int) -> None:
    ranks = tuple(range(10, 10 + num_ranks))
    for root in range(num_ranks):
        sent = traffic.tree(ranks, root, 7)
        assert [received_by(sent, rank) for rank in ranks] == [7 * (place != root) for place in range(num_ranks)]
        for place, rank in enumerate(ranks):
            expected = wire_bytes("broadcast", 7, num_ranks, "gloo", group_rank=place, root=root)
            assert sent_by(sent, rank) == expected


def test_a_tree_from_the_second_of_four_by_hand() -> None:
    assert traffic.tree((0, 1, 2, 3), 1, 1) == {(1, 2): 1, (1, 3): 1, (2, 0): 1}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_every_rank_sends_what_the_closed_form_of_its_collective_says(num_ranks: int) -> None:
    ranks = tuple(range(num_ranks))
    for sent, operation in (
        (traffic.all_reduce(ranks, 24 * num_ranks), "all_reduce"),
        (traffic.exchange(ranks, 24), "all_to_all"),
    ):
        of_ranks = {sent_by(sent, rank) for rank in ranks}
        assert of_ranks == {wire_bytes(operation, 24 * num_ranks, num_ranks)}
    gathered = traffic.all_gather_by_trees(ranks, 24)
    assert {received_by(gathered, rank) for rank in ranks} == {24 * (num_ranks - 1)}


def test_sums_and_multiples() -> None:
    once = Traffic({(0, 1): 3})
    assert traffic.total([once, Traffic({(0, 1): 4, (1, 0): 1})]) == {(0, 1): 7, (1, 0): 1}
    assert traffic.total([]) == {}
