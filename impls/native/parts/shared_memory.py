"""Summing buffers between the ranks of one machine through memory they all map, instead of through sockets.

To sum buffer b over n ranks, each rank owns one chunk of it:

                 rank 0's buffer    rank 1's buffer      flags
    1 publish    | a0 | a1 |        | b0 | b1 |          published[b] = epoch   my buffer is filled
    2 reduce     | S0 | a1 |        | b0 | S1 |          reduced[b]   = epoch   my chunk holds the sum
    3 use        S0 is read in rank 0's memory, S1 in    released[b]  = epoch   I need nothing of my peers' any more
                 rank 1's, by both

A rank sums its chunk straight out of its peers' buffers, and whoever needs the sum reads it where it is. Only the owner
of a chunk sums it, so the sums are the same bits everywhere. Nothing is sent and nobody is interrupted: a rank makes
`progress` between the pieces of its own backward pass, and waits only in `wait`. Before a buffer is filled anew its
owner must `reclaim` it: a slow peer may still be reading. The memory and the flags: parts/shared_region.py.

With a group `across` nodes these are the ranks of one node, and between 2 and 3 the owner of a chunk sums it with those
who own it on other nodes (parts/hierarchy.py).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from harness.implementation import CollectiveObserver
from harness.layout import Axis
from harness.mesh import Mesh
from impls.native.parts.shared_region import ALIGNMENT, SharedRegion, round_up

Transport = Literal["process_group", "shared_memory"]
TIMEOUT_SECONDS = 120.0
"""How long a rank waits in shared memory for a peer."""
_BLOCK_BYTES = 1 << 18  # a chunk is summed in blocks that stay in a core's own cache


class _Flag(IntEnum):
    PUBLISHED = 0
    REDUCED = 1
    RELEASED = 2


def why_not(mesh: Mesh, device: torch.device, axis: Axis = "data", *, inside_nodes: bool = False) -> str | None:
    """Why the group of this mesh along `axis`, or with `inside_nodes` its ranks on each node, cannot share memory, or
    None."""
    if device.type != "cpu":
        return f"tensors on {device.type} are reduced by its own library"
    if not inside_nodes and not mesh.on_one_node(axis):
        return "the group spans several nodes"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{platform.machine()} does not order its stores"
    if not hasattr(os, "memfd_create"):
        return f"{platform.system()} has no anonymous memory files"
    return None


class SharedBuffers:
    """The buffers of one rank and its view of its peers'. Collective over `group`; raises what SharedRegion does."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, torch.dtype]],
        group: dist.ProcessGroup,
        *,
        timeout_seconds: float,
        observer: CollectiveObserver | None = None,
        across: dist.ProcessGroup | None = None,
    ) -> None:
        self._across = across
        self._under_way: dict[int, Any] = {}  # sums across nodes, by buffer
        self._region = SharedRegion(
            [num_elements * dtype.itemsize for num_elements, dtype in shapes],
            group,
            flags=_Flag,
            things=[f"buffer {index}" for index in range(len(shapes))],
            purpose="gradients",
            timeout_seconds=timeout_seconds,
            observer=observer,
        )
        self.rank, self.num_ranks = self._region.rank, self._region.num_ranks
        self._epochs = [0] * len(shapes)
        self._unreduced: list[int] = []
        self._buffers = [self._region.tensors(index, *shape) for index, shape in enumerate(shapes)]
        self._chunks = [_chunk_bounds(n, dtype.itemsize, self.num_ranks) for n, dtype in shapes]

    def own(self, index: int) -> Tensor:
        """This rank's buffer (elements,), zero at first."""
        return self._buffers[index][self.rank]

    def reclaim(self, index: int) -> None:
        """Returns once no peer needs what the buffer held: only then may it be filled."""
        if not self._region.is_null:
            self._region.until_all(_Flag.RELEASED, index, self._epochs[index], self.progress)

    def publish(self, index: int) -> None:
        """This rank's buffer is filled; its sum begins."""
        if self._region.is_null:
            return
        self._epochs[index] += 1
        own = self.own(index)
        read = -(-2 * (self.num_ranks - 1) * own.numel() * own.itemsize // self.num_ranks)  # rounded up
        self._region.launched("all_reduce", index, own, read)
        self._region.set(_Flag.PUBLISHED, index, self._epochs[index])
        self._unreduced.append(index)
        self.progress()

    def progress(self) -> None:
        """Reduces this rank's chunk of every buffer that all peers have published; never waits."""
        for index in list(self._unreduced):
            if self._region.arrived(index) and self._region.all_reached(_Flag.PUBLISHED, index, self._epochs[index]):
                with self._region.blocked(index):
                    self._reduce(index)
                self._unreduced.remove(index)
            elif self._across is not None:
                break  # sums across nodes start in one order
        for index in [i for i, work in self._under_way.items() if work.is_completed()]:
            self._under_way.pop(index).wait()  # raises what went wrong
            self._region.set(_Flag.REDUCED, index, self._epochs[index])

    def wait(self, index: int) -> None:
        """Returns once every chunk holds its sum."""
        if not self._region.is_null:
            with self._region.blocked(index):
                self._region.until_all(_Flag.REDUCED, index, self._epochs[index], self.progress)
            self._region.completed(index)

    def sums(self, index: int) -> list[tuple[int, int, Tensor]]:
        """(start, stop, sum) of each chunk, in its owner's memory: to be read only, until `release`."""
        return [
            (start, stop, buffer[start:stop])
            for (start, stop), buffer in zip(self._chunks[index], self._buffers[index], strict=True)
            if start < stop
        ]

    def release(self, index: int) -> None:
        """This rank needs its peers' chunks no more."""
        if not self._region.is_null:
            self._region.set(_Flag.RELEASED, index, self._epochs[index])

    def collect(self, index: int) -> None:
        """Copies every chunk's sum into this rank's own buffer."""
        own = self.own(index)
        for start, stop, total in self.sums(index):
            if total.data_ptr() != own[start:stop].data_ptr():
                own[start:stop].copy_(total)
        self.release(index)

    def close(self) -> None:
        """Gives up the views; the memory goes when the last tensor on it does."""
        self._buffers.clear()
        self._region.close()

    def _reduce(self, index: int) -> None:
        """Sums this rank's chunk over all ranks into its own buffer, in blocks that stay in the cache meanwhile."""
        own = self.own(index)
        peers = [buffer for rank, buffer in enumerate(self._buffers[index]) if rank != self.rank]
        start, stop = self._chunks[index][self.rank]
        block = max(1, _BLOCK_BYTES // own.itemsize) if len(peers) > 1 else max(1, stop - start)
        for lower in range(start, stop, block):
            upper = min(lower + block, stop)
            for peer in peers:
                own[lower:upper].add_(peer[lower:upper])
        if self._across is not None and start < stop:
            self._under_way[index] = dist.all_reduce(own[start:stop], group=self._across, async_op=True)
        else:
            self._region.set(_Flag.REDUCED, index, self._epochs[index])


def _chunk_bounds(num_elements: int, itemsize: int, num_ranks: int) -> list[tuple[int, int]]:
    """[start, stop) of each rank's chunk; inner bounds fall on cache lines."""
    line = max(1, ALIGNMENT // itemsize)
    cuts = [min(num_elements, round_up(num_elements * rank // num_ranks, line)) for rank in range(num_ranks)]
    return list(zip(cuts, [*cuts[1:], num_elements], strict=True))
