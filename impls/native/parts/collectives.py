"""Ways to sum a buffer over a group, in place, while the caller goes on: each returns a handle to wait for.

all_reduce         the backend's own (gloo and NCCL: rings); 2(n-1)/n of the buffer leaves each rank
ring               ours over send and recv: n-1 steps of reduce-scatter, n-1 of all-gather (Patarasuk and Yuan 2009,
                   "Bandwidth optimal all-reduce algorithms for clusters of workstations"); the same bytes
parameter_server   every rank sends its buffer to the first, which sums and sends the sum back: n-1 whole buffers
                   leave the server (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server")
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# [Note: Pairs of messages] NCCL carries out the messages between two ranks one after another, in the order in which
# each of them asks. Where both send first, both wait for ever: the lower rank of a pair sends first, the higher one
# receives first.


class Handle(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Returns once the buffer holds the result."""
        ...


class BackgroundCollectives:
    """Carries out collectives that take several steps on a thread of its own, one after another in the order asked
    for: the same on every rank."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def start(self, collective: Callable[..., None], *arguments: Any) -> Handle:
        return _InBackground(self._executor.submit(collective, *arguments))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class _InBackground:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


def ring_all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Sums `buffer` (elements,) over the group, in place.

    step  rank 0 sends  rank 1 sends  rank 2 sends      n = 3; each rank adds what it receives, then, from step
      0       c0            c1            c2            n-1 on, each replaces
      1       c2            c0            c1
    """
    num_ranks, rank = group.size(), group.rank()
    if num_ranks == 1:
        return
    chunks = list(buffer.tensor_split(num_ranks))
    received = torch.empty_like(chunks[0])  # the first chunk is the longest
    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    for step in range(2 * (num_ranks - 1)):
        outgoing = chunks[(rank - step) % num_ranks]
        incoming = chunks[(rank - step - 1) % num_ranks]
        adds = step < num_ranks - 1
        landing = received[: incoming.numel()] if adds else incoming
        messages = [
            (outgoing, partial(dist.isend, outgoing, group=group, group_dst=right)),
            (landing, partial(dist.irecv, landing, group=group, group_src=left)),
        ]
        if num_ranks == 2 and rank == 1:
            messages.reverse()  # [Note: Pairs of messages]
        works = [start() for tensor, start in messages if tensor.numel()]
        for work in works:
            assert work is not None
            work.wait()
        if adds:
            incoming.add_(landing)


def parameter_server_all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Sums `buffer` (elements,) over the group, in place, on the group's first rank, which sends the sum to each."""
    num_ranks, rank = group.size(), group.rank()
    if num_ranks == 1 or not buffer.numel():
        return
    if rank != 0:
        dist.send(buffer, group=group, group_dst=0)
        dist.recv(buffer, group=group, group_src=0)
        return
    received = torch.empty_like(buffer)
    for client in range(1, num_ranks):
        dist.recv(received, group=group, group_src=client)
        buffer.add_(received)
    works = [dist.isend(buffer, group=group, group_dst=client) for client in range(1, num_ranks)]
    for work in works:
        assert work is not None
        work.wait()
