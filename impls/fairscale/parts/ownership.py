"""Which rank owns which parameters under FairScale's OSS, and the bytes that follow from it.

dealt out     | a a a a | b | c c | d |        each in turn to the first of the ranks that have least so far,
rank 0        | a a a a |                      those that decay first, then the others
rank 1                  | b | c c | d |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.parameters import LogicalParameter, MemoryCategory, replicated_state_bytes
from harness.wire_bytes import wire_bytes
from harness.workload import Workload

Shares = Sequence[Sequence[LogicalParameter]]
"""The trainable parameters of each rank."""


def shares_of(parameters: Sequence[LogicalParameter], num_ranks: int) -> Shares:
    """What each of `num_ranks` owns, in the order in which it is dealt out."""
    shares: list[list[LogicalParameter]] = [[] for _ in range(num_ranks)]
    for decayed in (True, False):
        for parameter in parameters:
            if parameter.trainable and parameter.decayed is decayed:
                min(shares, key=num_elements).append(parameter)
    return shares


def num_elements(share: Sequence[LogicalParameter]) -> int:
    return sum(parameter.num_elements for parameter in share)


def memory_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], num_ranks: int
) -> dict[MemoryCategory, int]:
    """Everything whole on every rank but the moments, which are those of the rank that owns most; the masters of all
    parameters where there are any."""
    precision, num_moments = workload.precision, workload.training.num_moments
    shares = shares_of(parameters, num_ranks)
    largest = max(shares, key=num_elements)
    states = replicated_state_bytes(largest, precision, num_moments)["optimizer_states"]
    if precision.master is not None:
        states += precision.master.itemsize * (sum(map(num_elements, shares)) - num_elements(largest))
    return {**replicated_state_bytes(parameters, precision, num_moments), "optimizer_states": states}


def owner_bytes(workload: Workload, shares: Shares) -> list[int]:
    """What each owner brings to all others once it has stepped: the masters where there are any."""
    master = workload.precision.master
    return [sum(p.num_elements * (master or p.dtype).itemsize for p in share) for share in shares]


def broadcast_bytes(rank: int, roots: Mapping[int, int] | Sequence[int], num_ranks: int) -> int:
    """What `rank` sends, and passes on for others, when each root brings its bytes to all ranks over gloo."""
    of_root = roots.items() if isinstance(roots, Mapping) else enumerate(roots)
    return sum(
        wire_bytes("broadcast", num_bytes, num_ranks, "gloo", group_rank=rank, root=root) for root, num_bytes in of_root
    )
