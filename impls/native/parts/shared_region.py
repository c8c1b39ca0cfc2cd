"""Memory that all ranks of one machine map, and the flags by which they tell each other how far they have come.

Every rank keeps its parts in an anonymous memory file that its peers map too:

    rank 0's file    | flags | part 0 | part 1 | ... | common 0 | ...     flags: one 64-bit number for each kind of flag
    rank 1's file    | flags | part 0 | part 1 | ...                      and each thing it is about; only the file's
                                                                          owner writes to them

A flag holds an epoch, which only grows: how many times its owner has done something to something. What the epochs
mean, and who may read whose parts when, is the business of the collectives on top.

[Note: Ordering] The flags are plain stores. x86 processors make stores visible in program order, so whoever sees the
flag sees the data (the C library fences the streaming stores of its memmove itself); nor do they move a store before a
load, so whoever sees the flag of a reader may overwrite what was read. Other processors promise neither, and
shared_memory.why_not sends them to the process group. The memory file has no name: it ends with the last process that
maps it, however that ends.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.implementation import CollectiveObserver

ALIGNMENT = 64  # bytes: a cache line, so that two ranks never write to the same one
_SPINS = 200
_NAP_SECONDS = 50e-6


class SharedRegion:
    """The parts of one rank, `part_bytes` each, its view of its peers', what lies there once for all of them
    (`common_bytes`), and everyone's flags: one of each kind of `flags` for each of `things`, whose names messages
    use. Collective over `group`, which exchanges only where the memory lies. On all ranks alike: MemoryError if one has
    not enough for its `purpose`, RuntimeError if a peer's memory cannot be mapped."""

    def __init__(
        self,
        part_bytes: Sequence[int],
        group: dist.ProcessGroup,
        *,
        common_bytes: Sequence[int] = (),
        flags: type[IntEnum],
        things: Sequence[str],
        purpose: str,
        timeout_seconds: float,
        observer: CollectiveObserver | None,
    ) -> None:
        self.rank, self.num_ranks = group.rank(), group.size()
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._kinds, self._things, self._num_things = flags, things, len(things)
        self._timeout_seconds = timeout_seconds
        self._observer = observer
        self._tickets: dict[int, int] = {}
        offsets, own_size = _laid_out(part_bytes, round_up(8 * len(flags) * max(1, len(things)), mmap.PAGESIZE))
        self._common_offsets, first_size = _laid_out(common_bytes, own_size)
        self._maps = _map_everyone([first_size, *[own_size] * (self.num_ranks - 1)], purpose, group)
        self._flags = [memoryview(mapped).cast("q") for mapped in self._maps]
        self._parts = [
            [_bytes_at(mapped, offset, num_bytes) for mapped in self._maps]
            for offset, num_bytes in zip(offsets, part_bytes, strict=True)
        ]

    def part(self, rank: int, index: int) -> Tensor:
        """(part_bytes,) of uint8, in the memory of the group's `rank`; zero at first."""
        return self._parts[index][rank]

    def tensors(self, index: int, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
        """The first elements of a part as (num_elements,) of `dtype`, in each rank's memory, in rank order."""
        return [part[: num_elements * dtype.itemsize].view(dtype) for part in self._parts[index]]

    def common(self, index: int, begin: int, num_bytes: int) -> Tensor:
        """(num_bytes,) of uint8, a storage of its own, from byte `begin` of what all ranks share; zero at first."""
        return _bytes_at(self._maps[0], self._common_offsets[index] + begin, num_bytes)

    def set(self, flag: IntEnum, index: int, epoch: int) -> None:
        """Tells everyone that this rank has come to `epoch`."""
        self._flags[self.rank][flag * self._num_things + index] = epoch

    def all_reached(self, flag: IntEnum, index: int, epoch: int) -> bool:
        position = flag * self._num_things + index
        return all(flags[position] >= epoch for flags in self._flags)

    def until_all(self, flag: IntEnum, index: int, epoch: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Returns once every rank has reached `epoch`; TimeoutError, which names who has not. Does `meanwhile` again
        and again until then."""
        self._until(lambda: self.all_reached(flag, index, epoch), flag, index, epoch, meanwhile)

    def until_one(self, rank: int, flag: IntEnum, index: int, epoch: int) -> None:
        """Returns once the group's `rank` has reached `epoch`; TimeoutError as above."""
        flags, position = self._flags[rank], flag * self._num_things + index
        self._until(lambda: flags[position] >= epoch, flag, index, epoch, lambda: None)

    @property
    def is_null(self) -> bool:
        """Whether collectives must do nothing at all; see CollectiveObserver."""
        return self._observer is not None and self._observer.null

    def launched(self, operation: str, index: int, payload: Tensor, read_bytes: int) -> None:
        """A collective on thing `index` starts, in which this rank reads `read_bytes` of its peers' memory."""
        if self._observer is not None:
            ticket = self._observer.launched(operation, self._ranks, payload, read_bytes, "shared_memory")
            self._tickets[index] = ticket

    def arrived(self, index: int) -> bool:
        """Whether the latest collective on thing `index` may go on; see CollectiveObserver."""
        return self._observer is None or index not in self._tickets or self._observer.arrived(self._tickets[index])

    def until_arrived(self, index: int) -> None:
        """Returns once it may go on: at once, unless a longer link is played."""
        while not self.arrived(index):
            time.sleep(_NAP_SECONDS)

    def completed(self, index: int) -> None:
        if self._observer is not None and index in self._tickets:
            self._observer.completed(self._tickets[index])

    def blocked(self, index: int) -> AbstractContextManager[None]:
        """Surrounds whatever this rank does or waits for in the latest collective on thing `index`."""
        if self._observer is None or index not in self._tickets:
            return nullcontext()
        return self._observer.blocked(self._tickets[index])

    def close(self) -> None:
        """Gives up the views; the memory goes when the last tensor on it does."""
        self._parts.clear()
        for flags in self._flags:
            flags.release()
        self._flags.clear()
        self._maps.clear()

    def _until(
        self, reached: Callable[[], bool], flag: IntEnum, index: int, epoch: int, meanwhile: Callable[[], None]
    ) -> None:
        """Gives the processor to others first, then naps: with more ranks than cores a spinning rank stops the very
        peer it waits for."""
        deadline = time.monotonic() + self._timeout_seconds
        spins = 0
        while not reached():
            spins += 1
            meanwhile()
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(_NAP_SECONDS)
            if time.monotonic() > deadline:
                raise TimeoutError(self._who_is_late(flag, index, epoch))

    def _who_is_late(self, awaited: IntEnum, index: int, epoch: int) -> str:
        """Names the ranks that lag behind all others: who is late with the first kind of flag may well keep everybody,
        even this rank, from setting the next."""
        for flag in self._kinds:
            position = flag * self._num_things + index
            late = [str(rank) for rank, flags in zip(self._ranks, self._flags, strict=True) if flags[position] < epoch]
            itself = str(self._ranks[self.rank])
            if flag == awaited or (late and itself not in late):
                break
        return (
            f"shared memory: rank {self._ranks[self.rank]} waited {self._timeout_seconds:g} s for "
            f"rank {', '.join(late)} to have {flag.name.lower()} {self._things[index]}"
        )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _laid_out(part_bytes: Sequence[int], begin: int) -> tuple[list[int], int]:
    """Where each part lies, from `begin` on, and where they end."""
    offsets = []
    for num_bytes in part_bytes:
        offsets.append(begin)
        begin += round_up(num_bytes, ALIGNMENT)
    return offsets, begin


def _map_everyone(sizes: Sequence[int], purpose: str, group: dist.ProcessGroup) -> list[mmap.mmap]:
    """Creates this rank's memory file and maps those of all ranks, in rank order, each of its own size."""
    size = sizes[group.rank()]
    descriptor = os.memfd_create("meshmark")
    maps: list[mmap.mmap] = []
    try:
        lack = None
        try:
            os.posix_fallocate(descriptor, 0, size)  # a lack of memory shows here, not as a SIGBUS in a later step
        except OSError as error:
            lack = f"rank {dist.get_rank()} needs {size} bytes for its {purpose}: {error.strerror}"
        _raise_anyones(lack, MemoryError, group)
        places: list[Any] = [None] * group.size()
        dist.all_gather_object(places, (os.getpid(), descriptor), group=group)
        problem = None
        for (pid, number), of_rank in zip(places, sizes, strict=True):
            try:
                with open(f"/proc/{pid}/fd/{number}", "r+b") as file:  # noqa: PTH123  not a path on a disk
                    maps.append(mmap.mmap(file.fileno(), of_rank))
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


def _bytes_at(mapped: mmap.mmap, offset: int, num_bytes: int) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=offset)
