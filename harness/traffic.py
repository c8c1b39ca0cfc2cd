"""Traffic: what each rank sends to each other one in a step, in closed form, and how much of it leaves a node.

ring        every rank sends as much to the next one          all-reduce, all-gather
exchange    every rank sends as much to every other           reduce-scatter by pieces, all-to-all
tree        the root's bytes, passed on                        gloo's broadcast
message     one rank to another                                a pipeline's border

ring over {0 1 2 3}    node 0: 0 1   node 1: 2 3     one of a node's two messages leaves it
                       node 0: 0 2   node 1: 1 3     both do
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from harness.parameters import all_reduce_wire_bytes
from harness.placement import Seats

Traffic = Counter[tuple[int, int]]
"""Bytes by sender and receiver."""


def ring(ranks: Sequence[int], sent_bytes: int) -> Traffic:
    """Each of `ranks` sends `sent_bytes` to the next."""
    if len(ranks) == 1:
        return Traffic()
    return Traffic({(rank, ranks[(place + 1) % len(ranks)]): sent_bytes for place, rank in enumerate(ranks)})


def all_reduce(ranks: Sequence[int], num_bytes: int) -> Traffic:
    """A ring that sums `num_bytes`."""
    return ring(ranks, all_reduce_wire_bytes(num_bytes, len(ranks)))


def exchange(ranks: Sequence[int], piece_bytes: int) -> Traffic:
    """Each of `ranks` sends a piece to every other."""
    return Traffic({(here, there): piece_bytes for here in ranks for there in ranks if here != there})


def tree(ranks: Sequence[int], root: int, num_bytes: int) -> Traffic:
    """gloo's broadcast from the rank at place `root`: in round i = 0, 1, 2, ... every rank that has the bytes, places 0
    to 2^i - 1 from the root, sends them on to the one 2^i on."""
    sent, num_ranks = Traffic(), len(ranks)
    for i in range(num_ranks.bit_length()):
        for place in range(min(1 << i, num_ranks - (1 << i))):
            here, there = ((root + at) % num_ranks for at in (place, place + (1 << i)))
            sent[ranks[here], ranks[there]] += num_bytes
    return sent


def all_gather_by_trees(ranks: Sequence[int], piece_bytes: int) -> Traffic:
    """Each of `ranks` broadcasts its piece."""
    return total(tree(ranks, root, piece_bytes) for root in range(len(ranks)))


def total(parts: Iterable[Traffic]) -> Traffic:
    summed = Traffic()
    for part in parts:
        summed.update(part)
    return summed


def leaving_bytes(traffic: Traffic, seats: Seats) -> list[int]:
    """Of each node what its ranks send to those of others."""
    nodes = seats.node_of_rank
    leaving = [0] * (max(nodes) + 1)
    for (here, there), num_bytes in traffic.items():
        if nodes[here] != nodes[there]:
            leaving[nodes[here]] += num_bytes
    return leaving
