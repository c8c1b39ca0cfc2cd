"""Every allocation and free of a device's allocator between two moments, read from torch's profiler.

The profiler hears of each one from inside the allocator, with its address and exact size, so that reducer buckets and
what autograd saves in C++ are seen like any tensor. Three things are not: memory that no torch allocator handed out
(mappings, arrays of other libraries); what threads do, but for the one that profiles, autograd's and those that join
it (profiled_threads.py); and blocks from before the profile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import profile

FOREVER = 1 << 63
"""The time at which a block dies that was still alive when the profile ended."""


class EmptyProfile(RuntimeError):
    """The profiler recorded no allocation at all: it was switched off, or another profiler held its place."""


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation: alive from `born` until just before `died`, in nanoseconds of the profiler's clock."""

    address: int
    num_bytes: int
    born: int
    died: int


@dataclass(frozen=True, slots=True)
class Mark:
    """An interval that `record_function(name)` enclosed, in nanoseconds of the profiler's clock."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What one profile saw: blocks in order of birth and marks in order of their begin."""

    blocks: tuple[Block, ...]
    marks: tuple[Mark, ...]

    def marked(self, name: str) -> list[Mark]:
        """The marks called `name`, in order."""
        return [mark for mark in self.marks if mark.name == name]


class Curve:
    """The number of bytes alive in `blocks` as a step function of time. At one and the same nanosecond births come
    before deaths, so that a peak is never understated."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        changes = sorted(
            change
            for block in blocks
            for change in ((block.born, -block.num_bytes), (block.died, block.num_bytes))
            if change[0] < FOREVER
        )
        self._times = [time for time, _ in changes]
        self._levels = [0, *accumulate(-freed for _, freed in changes)]  # one before each change, one after the last

    def at(self, time: int) -> int:
        """Bytes alive at `time`, after all that happened at it."""
        return self._levels[bisect_right(self._times, time)]

    def peak(self, begin: int, end: int) -> tuple[int, int]:
        """The most bytes alive at any moment of [begin, end], and the first moment at which they were."""
        first, last = bisect_right(self._times, begin), bisect_right(self._times, end)
        top = max(range(first, last + 1), key=self._levels.__getitem__)
        return self._levels[top], begin if top == first else self._times[top - 1]


def pair(changes: Iterable[tuple[int, int, int]]) -> tuple[Block, ...]:
    """The blocks behind (time, address, bytes) changes, where freed bytes are negative; in any order.

    A free of an unknown address belongs to a block from before the profile and is left out. A block that comes to life
    at the address of a living one proves that the earlier one was freed unseen.
    """
    blocks: list[Block] = []
    alive: dict[int, tuple[int, int]] = {}  # address -> (time, bytes)
    for time, address, num_bytes in sorted(changes):
        if address in alive:
            born, size = alive.pop(address)
            blocks.append(Block(address, size, born, time))
        if num_bytes > 0:
            alive[address] = (time, num_bytes)
    blocks += [Block(address, size, born, FOREVER) for address, (born, size) in alive.items()]
    return tuple(sorted(blocks, key=lambda block: (block.born, block.address)))


def read_profile(profiler: profile, device: torch.device, mark_prefix: str) -> Timeline:
    """The blocks of `device` and the marks whose name starts with `mark_prefix`, from a `profiler` that ran with
    profile_memory=True and has stopped. EmptyProfile if it holds no allocation."""
    changes, marks = [], []
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    for event in _every_event(results.experimental_event_tree() if results else ()):
        if event.tag == torch._C._profiler._EventType.Allocation:
            allocation = event.extra_fields
            if allocation.device.type == device.type and device.index in (None, allocation.device.index):
                changes.append((event.start_time_ns, allocation.ptr, allocation.alloc_size))
        elif event.name.startswith(mark_prefix):
            marks.append(Mark(event.name, event.start_time_ns, event.start_time_ns + event.duration_time_ns))
    if not changes:
        raise EmptyProfile(f"expected the profiler to record allocations on {device}, it recorded none")
    return Timeline(blocks=pair(changes), marks=tuple(sorted(marks, key=lambda mark: (mark.begin, mark.end))))


def _every_event(roots: Sequence[Any]) -> Iterator[Any]:
    """All events of the profiler's forest, in no particular order, without recursion."""
    left = list(roots)
    while left:
        event = left.pop()
        yield event
        left.extend(event.children)
