"""The reduce-scatter of the sharded optimizer's gradients (parts/gradient_shards.py) through memory that all ranks of a
group map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch.distributed as dist
from torch import Tensor

from harness.implementation import CollectiveObserver
from impls.native.parts import ordered_sum
from impls.native.parts.gradient_shards import Flat, Then, slot_bytes, sums_alone
from impls.native.parts.shared_region import SharedRegion


class _Flag(IntEnum):
    PUBLISHED = 0  # own(index) is filled
    REDUCED = 1  # my shard is summed: I need nothing of my peers' any more


class SharedMemoryShards:
    """Through memory that all ranks map (parts/shared_region.py): each rank sums its shard straight out of its peers'
    slots. Collective over `group`; raises what SharedRegion does."""

    def __init__(
        self,
        flats: Sequence[Flat],
        group: dist.ProcessGroup,
        *,
        timeout_seconds: float,
        observer: CollectiveObserver | None = None,
    ) -> None:
        sizes = slot_bytes(flats, group.size())
        self._region = SharedRegion(
            list(sizes.values()),
            group,
            flags=_Flag,
            things=[f"flat {index}" for index in range(len(flats))],
            purpose="gradients",
            timeout_seconds=timeout_seconds,
            observer=observer,
        )
        self._flats = flats
        self._rank, self._num_ranks = self._region.rank, self._region.num_ranks
        self._part_of_slot = {slot: part for part, slot in enumerate(sizes)}
        everyones = [
            self._region.tensors(self._part_of_slot[flat.slot], self._num_ranks * flat.num_shard_elements, flat.dtype)
            for flat in flats
        ]
        self._own = [fulls[self._rank] for fulls in everyones]
        self._shares = [
            [flat.shard(full, self._rank) for full in fulls] for flat, fulls in zip(flats, everyones, strict=True)
        ]
        self._epochs = [0] * len(flats)
        self._unreduced: dict[int, tuple[Tensor, bool]] = {}  # into, add; in the order of their starts
        self._thens: dict[int, Then] = {}  # of sums under way, in this order too
        self._last_of_slot: dict[int, int] = {}

    def own(self, index: int) -> Tensor:
        return self._own[index]

    def rest(self) -> None:
        pass  # what peers map stays

    def reclaim(self, index: int) -> None:
        last = self._last_of_slot.get(self._flats[index].slot)
        if last is not None:
            with self._region.blocked(last):
                self._region.until_all(_Flag.REDUCED, last, self._epochs[last], self.progress)

    def start(self, index: int, into: Tensor, *, add: bool, then: Then | None = None) -> None:
        flat, own = self._flats[index], self._own[index]
        if sums_alone(flat, self._num_ranks, is_null=self._region.is_null):
            ordered_sum.write([flat.shard(own, self._rank)], into, add=add)
            if then is not None:
                self._thens[index] = then
                self._go_on()
            return
        self._epochs[index] += 1
        self._last_of_slot[flat.slot] = index
        self._unreduced[index] = (into, add)
        if then is not None:
            self._thens[index] = then
        self._region.launched("reduce_scatter", index, own, (self._num_ranks - 1) * flat.shard_bytes)
        self._region.set(_Flag.PUBLISHED, index, self._epochs[index])
        self.progress()

    def progress(self) -> None:
        for index in [
            i
            for i in self._unreduced
            if self._region.arrived(i) and self._region.all_reached(_Flag.PUBLISHED, i, self._epochs[i])
        ]:
            into, add = self._unreduced.pop(index)
            with self._region.blocked(index):
                ordered_sum.write(self._shares[index], into, add=add)
            self._region.set(_Flag.REDUCED, index, self._epochs[index])
            self._region.completed(index)
        self._go_on()

    def _go_on(self) -> None:
        """To what comes after sums, in their order: a later one may have been made before an earlier one."""
        while self._thens and (earliest := next(iter(self._thens))) not in self._unreduced:
            self._thens.pop(earliest)()

    def wait(self, index: int) -> None:
        if index in self._unreduced:
            self._region.until_arrived(index)
            with self._region.blocked(index):
                self._region.until_all(_Flag.PUBLISHED, index, self._epochs[index], self.progress)
            self.progress()

    def buffers(self) -> Iterable[Tensor]:
        return [self._region.part(self._rank, part) for part in self._part_of_slot.values()]

    def close(self) -> None:
        """Gives up the views; the memory goes when the last tensor on it does."""
        self._own.clear()
        self._shares.clear()
        self._unreduced.clear()
        self._thens.clear()
        self._region.close()
