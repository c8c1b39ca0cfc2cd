"""Which rank steps which elements under DeepSpeed's stages 1 and 2.

group          | a a a a a | b b | c c c c | d d d | . |     parameters end to end, then padding
partitions     |     rank 0      |      rank 1         |     cut evenly, wherever that falls
gradients      | a a a a a | b b | c c c c |                 rank 0 keeps those that it steps a part of, whole
                                 | c c c c | d d d |         ... and rank 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.parameters import LogicalParameter


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one parameter that one rank steps."""

    owner: int
    num_elements: int


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The pieces of each parameter that has elements, by name, in the engine's order; and of each group of parameters
    the elements that one rank steps, padding included."""

    pieces: Mapping[str, Sequence[Piece]]
    sharded_elements: Sequence[int]
    num_ranks: int

    def owns(self, rank: int, name: str) -> bool:
        """Whether `rank` steps any element of it."""
        return any(piece.owner == rank for piece in self.pieces[name])

    def kept_elements(self, rank: int) -> int:
        """Of the gradients that `rank` keeps until the update."""
        return sum(
            sum(piece.num_elements for piece in pieces) for name, pieces in self.pieces.items() if self.owns(rank, name)
        )

    def largest_rank(self) -> int:
        """The one that keeps most."""
        return max(range(self.num_ranks), key=self.kept_elements)


def partition_of(parameters: Sequence[LogicalParameter], num_ranks: int) -> Partition:
    """How `num_ranks` share the parameters that are trained, group by group."""
    pieces: dict[str, Sequence[Piece]] = {}
    sharded = []
    for group in decay_groups_of(parameters):
        size = padded_elements(group, num_ranks) // num_ranks
        begin = 0
        for parameter in group:
            if parameter.num_elements:
                pieces[parameter.name] = list(_pieces(begin, begin + parameter.num_elements, size))
            begin += parameter.num_elements
        sharded.append(size)
    return Partition(pieces=pieces, sharded_elements=sharded, num_ranks=num_ranks)


def decay_groups_of(parameters: Sequence[LogicalParameter]) -> Iterator[list[LogicalParameter]]:
    """What is trained and decays, then what is trained and does not."""
    for decayed in (True, False):
        group = [parameter for parameter in parameters if parameter.trainable and parameter.decayed is decayed]
        if group:
            yield group


def padded_elements(group: Sequence[LogicalParameter], num_ranks: int) -> int:
    """Of a group laid end to end: an even number for each rank."""
    return 2 * num_ranks * -(-sum(parameter.num_elements for parameter in group) // (2 * num_ranks))


def _pieces(begin: int, end: int, size: int) -> Iterator[Piece]:
    while begin < end:
        owner = begin // size
        upto = min(end, (owner + 1) * size)
        yield Piece(owner, upto - begin)
        begin = upto
