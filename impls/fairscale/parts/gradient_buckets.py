"""Which gradients ShardedDataParallel reduces together, and the bytes that follow from it.

by size, smallest first:  | a | b | c | d |   e   |      f        |
bucket of owner 0         | a |   | c |   |   e   |                  whole on every rank, for good
bucket of owner 1             | b |   | d |
on its own                                        |      f        |  whole until it is reduced, then its owner's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.parameters import LogicalParameter
from harness.wire_bytes import wire_bytes
from impls.fairscale.parts.ownership import Shares, num_elements


@dataclass(frozen=True, kw_only=True)
class Reductions:
    """The parameters of each owner's bucket, and of each owner those that are reduced one by one."""

    bucketed: Shares
    alone: Shares

    def gradient_bytes(self, rank: int) -> int:
        """What `rank` keeps between steps."""
        return sum(map(_num_bytes, self.bucketed)) + _num_bytes(self.alone[rank])

    def wire_bytes(self, rank: int) -> int:
        """What `rank` sends over gloo until every owner has its sums."""
        num_ranks = len(self.alone)
        payloads = [(owner, _num_bytes(share)) for owner, share in enumerate(self.bucketed)]
        payloads += [(owner, parameter.num_bytes) for owner, share in enumerate(self.alone) for parameter in share]
        return sum(
            wire_bytes("reduce", num_bytes, num_ranks, "gloo", group_rank=rank, root=owner)
            for owner, num_bytes in payloads
        )


def reductions_of(shares: Shares, num_model_elements: int, reduce_buffer_size: int) -> Reductions:
    """`reduce_buffer_size` counts elements, of which a bucket never fills the last one; a model of
    `num_model_elements`, frozen ones too, needs no larger buckets, and a single rank none."""
    capacity = min(reduce_buffer_size, num_model_elements) if len(shares) > 1 else 0
    bucketed: list[list[LogicalParameter]] = [[] for _ in shares]
    alone: list[list[LogicalParameter]] = [[] for _ in shares]
    owned = [(owner, p) for owner, share in enumerate(shares) for p in sorted(share, key=_size)]
    for owner, parameter in sorted(owned, key=lambda pair: _size(pair[1])):
        fits = num_elements(bucketed[owner]) + parameter.num_elements < capacity
        (bucketed if fits else alone)[owner].append(parameter)
    return Reductions(bucketed=bucketed, alone=alone)


def _size(parameter: LogicalParameter) -> int:
    return parameter.num_elements


def _num_bytes(share: Sequence[LogicalParameter]) -> int:
    return sum(parameter.num_bytes for parameter in share)
