"""Summing buffers between the ranks of one machine through memory they all map, instead of through sockets.

Every rank keeps its buffers in an anonymous memory file that its peers map too. To sum buffer b over n ranks, each rank
owns one chunk of it:

                 rank 0's buffer    rank 1's buffer      flags (one writer each, on pages all ranks map)
    1 publish    | a0 | a1 |        | b0 | b1 |          published[b] = epoch   my buffer is filled
    2 reduce     | S0 | a1 |        | b0 | S1 |          reduced[b]   = epoch   my chunk holds the sum
    3 use        S0 is read in rank 0's memory, S1 in    released[b]  = epoch   I need nothing of my peers' any more
                 rank 1's, by both

A rank sums its chunk straight out of its peers' buffers, and whoever needs the sum reads it where it is. Only the owner
of a chunk sums it, so the sums are the same bits everywhere. Nothing is sent and nobody is interrupted: a rank makes
`progress` between the pieces of its own backward pass, and waits only in `wait`. Before a buffer is filled anew its
owner must `reclaim` it: a slow peer may still be reading.

[Note: Ordering] The flags are plain stores. x86 processors make stores visible in program order, so whoever sees the
flag sees the data (the C library fences the streaming stores of its memmove itself); other processors do not promise
it, and `why_not` sends them to the process group. The memory file has no name: it ends with the last process that maps
it, however that ends.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.implementation import CollectiveObserver
from harness.mesh import Mesh

_ALIGNMENT = 64  # bytes: a cache line, so that two ranks never write to the same one
_BLOCK_BYTES = 1 << 18  # a chunk is summed in blocks that stay in a core's own cache
_SPINS = 200
_NAP_SECONDS = 50e-6


class _Flag(IntEnum):
    PUBLISHED = 0
    REDUCED = 1
    RELEASED = 2


def why_not(mesh: Mesh, device: torch.device) -> str | None:
    """Why the data group of this mesh cannot share memory, or None."""
    if device.type != "cpu":
        return f"tensors on {device.type} are reduced by its own library"
    if not mesh.on_one_node("data"):
        return "the group spans several nodes"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{platform.machine()} does not order its stores"
    if not hasattr(os, "memfd_create"):
        return f"{platform.system()} has no anonymous memory files"
    return None


class SharedBuffers:
    """The buffers of one rank and its view of its peers'. Collective over `group`, which exchanges only where the
    memory lies. On all ranks alike: MemoryError if one has not enough, RuntimeError if a peer's cannot be mapped."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, torch.dtype]],
        group: dist.ProcessGroup,
        *,
        timeout_seconds: float,
        observer: CollectiveObserver | None = None,
    ) -> None:
        self.rank, self.num_ranks = group.rank(), group.size()
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._timeout_seconds = timeout_seconds
        self._observer = observer
        self._epochs = [0] * len(shapes)
        self._unreduced: list[int] = []
        self._tickets: dict[int, int] = {}
        offsets, size = [], _round_up(8 * len(_Flag) * max(1, len(shapes)), mmap.PAGESIZE)
        for num_elements, dtype in shapes:
            offsets.append(size)
            size += _round_up(num_elements * dtype.itemsize, _ALIGNMENT)
        self._maps = _map_everyone(size, group)
        self._flags = [memoryview(mapped).cast("q") for mapped in self._maps]
        self._num_buffers = len(shapes)
        self._buffers = [
            [_tensor_at(mapped, offset, *shape) for mapped in self._maps]
            for offset, shape in zip(offsets, shapes, strict=True)
        ]
        self._chunks = [_chunk_bounds(n, dtype.itemsize, self.num_ranks) for n, dtype in shapes]

    def own(self, index: int) -> Tensor:
        """This rank's buffer (elements,), zero at first."""
        return self._buffers[index][self.rank]

    def reclaim(self, index: int) -> None:
        """Returns once no peer needs what the buffer held: only then may it be filled."""
        if not self._is_null():
            self._until_all(_Flag.RELEASED, index)

    def publish(self, index: int) -> None:
        """This rank's buffer is filled; its sum begins."""
        if self._is_null():
            return
        self._epochs[index] += 1
        if self._observer is not None:
            own = self.own(index)
            read = -(-2 * (self.num_ranks - 1) * own.numel() * own.itemsize // self.num_ranks)  # rounded up
            self._tickets[index] = self._observer.launched("all_reduce", self._ranks, own, read, "shared_memory")
        self._set(_Flag.PUBLISHED, index)
        self._unreduced.append(index)
        self.progress()

    def progress(self) -> None:
        """Reduces this rank's chunk of every buffer that all peers have published; never waits."""
        for index in [i for i in self._unreduced if self._all_reached(_Flag.PUBLISHED, i)]:
            self._observed(index, partial(self._reduce, index))
            self._unreduced.remove(index)

    def wait(self, index: int) -> None:
        """Returns once every chunk holds its sum."""
        if not self._is_null():
            self._observed(index, partial(self._until_all, _Flag.REDUCED, index))
            if self._observer is not None:
                self._observer.completed(self._tickets[index])

    def sums(self, index: int) -> list[tuple[int, int, Tensor]]:
        """(start, stop, sum) of each chunk, in its owner's memory: to be read only, until `release`."""
        return [
            (start, stop, buffer[start:stop])
            for (start, stop), buffer in zip(self._chunks[index], self._buffers[index], strict=True)
            if start < stop
        ]

    def release(self, index: int) -> None:
        """This rank needs its peers' chunks no more."""
        if not self._is_null():
            self._set(_Flag.RELEASED, index)

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
        for flags in self._flags:
            flags.release()
        self._flags.clear()
        self._maps.clear()

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
        self._set(_Flag.REDUCED, index)

    def _set(self, flag: _Flag, index: int) -> None:
        self._flags[self.rank][flag * self._num_buffers + index] = self._epochs[index]

    def _all_reached(self, flag: _Flag, index: int) -> bool:
        position, epoch = flag * self._num_buffers + index, self._epochs[index]
        return all(flags[position] >= epoch for flags in self._flags)

    def _until_all(self, flag: _Flag, index: int) -> None:
        """Gives the processor to others first, then naps: with more ranks than cores a spinning rank stops the very
        peer it waits for."""
        deadline = time.monotonic() + self._timeout_seconds
        spins = 0
        while not self._all_reached(flag, index):
            spins += 1
            self.progress()
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(_NAP_SECONDS)
            if time.monotonic() > deadline:
                raise TimeoutError(self._who_is_late(index))

    def _who_is_late(self, index: int) -> str:
        """Names the ranks that lag behind all others: who has not published keeps even this rank from reducing."""
        epoch = self._epochs[index]
        for flag in _Flag:
            position = flag * self._num_buffers + index
            late = [str(rank) for rank, flags in zip(self._ranks, self._flags, strict=True) if flags[position] < epoch]
            if late:
                break
        return (
            f"shared memory: rank {self._ranks[self.rank]} waited {self._timeout_seconds:g} s for "
            f"rank {', '.join(late)} to have {flag.name.lower()} buffer {index}"
        )

    def _is_null(self) -> bool:
        return self._observer is not None and self._observer.null

    def _observed(self, index: int, work: Callable[[], None]) -> None:
        if self._observer is None:
            work()
            return
        with self._observer.blocked(self._tickets[index]):
            work()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _chunk_bounds(num_elements: int, itemsize: int, num_ranks: int) -> list[tuple[int, int]]:
    """[start, stop) of each rank's chunk; inner bounds fall on cache lines."""
    line = max(1, _ALIGNMENT // itemsize)
    cuts = [min(num_elements, _round_up(num_elements * rank // num_ranks, line)) for rank in range(num_ranks)]
    return list(zip(cuts, [*cuts[1:], num_elements], strict=True))


def _map_everyone(size: int, group: dist.ProcessGroup) -> list[mmap.mmap]:
    """Creates this rank's memory file and maps those of all ranks, in rank order."""
    descriptor = os.memfd_create("meshmark")
    maps: list[mmap.mmap] = []
    try:
        lack = None
        try:
            os.posix_fallocate(descriptor, 0, size)  # a lack of memory shows here, not as a SIGBUS in a later step
        except OSError as error:
            lack = f"rank {dist.get_rank()} needs {size} bytes for its gradients: {error.strerror}"
        _raise_anyones(lack, MemoryError, group)
        places: list[Any] = [None] * group.size()
        dist.all_gather_object(places, (os.getpid(), descriptor), group=group)
        problem = None
        for pid, number in places:
            try:
                with open(f"/proc/{pid}/fd/{number}", "r+b") as file:  # noqa: PTH123  not a path on a disk
                    maps.append(mmap.mmap(file.fileno(), size))
            except OSError as error:
                problem = f"the memory of process {pid} cannot be mapped by rank {dist.get_rank()}: {error}"
                break
        _raise_anyones(problem, RuntimeError, group)  # nobody closes its file before all have mapped it
        return maps
    finally:
        os.close(descriptor)


def _raise_anyones(problem: str | None, kind: type[Exception], group: dist.ProcessGroup) -> None:
    """Raises on every rank what went wrong on any: a rank that failed alone would leave its peers waiting."""
    problems: list[Any] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    if first := next(filter(None, problems), None):
        raise kind(f"shared memory: {first}")


def _tensor_at(mapped: mmap.mmap, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    if num_elements == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=num_elements, offset=offset)
