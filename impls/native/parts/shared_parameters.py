"""The gathers of parameters (parts/parameter_gathers.py) through memory that all ranks map.

    keeps_full    SharedMemoryGathers: each rank copies its peers' shards from where they live, the optimizer's own
                  memory, into a full of its own
    otherwise     ParametersInPlace: there is one full for all ranks, and nothing to copy
                       memory of all     | A0 | A1 | B0 | B1 | C0 | C1 |     full(A) is A0 and A1, of every rank
                       rank 0's shards     ^^        ^^        ^^            which alone updates them

[Note: Shards are read unguarded] Of copies nobody asks whether a peer has finished reading a shard before its owner
updates it again. An update needs the sum of the flat's gradients, so every rank has published these; and every rank has
finished its gather of a flat before it publishes that flat's next gradients. Whoever gathers between steps finishes
before the next step begins, likewise.

[Note: Shards are used where they lie] In place that is not enough: a rank may have published a flat's gradients and
still go on to read its parameters in backward. So nobody updates before all have come to the end of backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from harness.implementation import CollectiveObserver
from impls.native.parts import flat_memory
from impls.native.parts.gradient_shards import Flat
from impls.native.parts.parameter_gathers import check_slots
from impls.native.parts.shared_region import SharedRegion


class _Flag(IntEnum):
    PUBLISHED = 0
    FINISHED = 1


class _SharedGathers(ABC):
    """What both have in common. The region flags one thing beside the flats: the end of backward."""

    def __init__(self, region: SharedRegion, flats: Sequence[Flat], fulls: list[Tensor], shards: list[Tensor]) -> None:
        self._region, self._flats = region, flats
        self._fulls, self._own_shards = fulls, shards
        self._epochs = [0] * len(flats)
        self._awaited: dict[int, int] = {}  # the epoch of each flat that is being gathered

    def shard(self, index: int) -> Tensor:
        return self._own_shards[index]

    def full(self, index: int) -> Tensor:
        return self._fulls[index]

    def publish(self, index: int) -> None:
        self._epochs[index] += 1
        self._region.set(_Flag.PUBLISHED, index, self._epochs[index])

    def start(self, index: int) -> None:
        if self._region.is_null or self._region.num_ranks == 1:
            return
        self._awaited[index] = self._epochs[index]
        read = (self._region.num_ranks - 1) * self._flats[index].shard_bytes
        self._region.launched("all_gather", index, self._fulls[index], read)

    def wait(self, index: int) -> None:
        epoch = self._awaited.pop(index, None)
        if epoch is None:
            return
        self._region.until_arrived(index)
        with self._region.blocked(index):
            self._receive(index, epoch)
        self._region.completed(index)

    def release(self, index: int) -> None:
        return  # what is whole is everybody's, or stays

    def buffers(self) -> Iterable[Tensor]:
        return []

    def close(self) -> None:
        """Gives up the views; the memory goes when the last tensor on it does."""
        self._fulls.clear()
        self._own_shards.clear()
        self._awaited.clear()
        self._region.close()

    @abstractmethod
    def _receive(self, index: int, epoch: int) -> None:
        """Makes `full(index)` whole, of what its owners published in `epoch`."""


class SharedMemoryGathers(_SharedGathers):
    """Every rank keeps every flat whole. Collective over `group`; raises what SharedRegion does."""

    def __init__(
        self,
        flats: Sequence[Flat],
        group: dist.ProcessGroup,
        *,
        timeout_seconds: float,
        observer: CollectiveObserver | None = None,
    ) -> None:
        check_slots(flats, keeps_full=True)
        num_ranks = group.size()
        part_bytes = [num_ranks * flat.shard_bytes for flat in flats]
        region = _region(flats, group, timeout_seconds, observer, part_bytes=part_bytes)
        fulls = [
            region.tensors(index, num_ranks * flat.num_shard_elements, flat.dtype) for index, flat in enumerate(flats)
        ]
        self._shards = [
            [flat.shard(full, owner) for owner, full in enumerate(of_ranks)]
            for flat, of_ranks in zip(flats, fulls, strict=True)
        ]
        super().__init__(
            region,
            flats,
            [of_ranks[region.rank] for of_ranks in fulls],
            [of_owners[region.rank] for of_owners in self._shards],
        )

    def begin_update(self, meanwhile: Callable[[], None]) -> None:
        """See [Note: Shards are read unguarded]."""

    def close(self) -> None:
        self._shards.clear()
        super().close()

    def _receive(self, index: int, epoch: int) -> None:
        """Shard by shard: ranks start at different owners, and nobody waits for the slowest before the others' are
        done."""
        flat, full, shards = self._flats[index], self._fulls[index], self._shards[index]
        for distance in range(1, self._region.num_ranks):
            owner = (self._region.rank + distance) % self._region.num_ranks
            self._region.until_one(owner, _Flag.PUBLISHED, index, epoch)
            flat_memory.copy_into(flat.shard(full, owner), shards[owner])


class ParametersInPlace(_SharedGathers):
    """Flats that lie there once, and that every rank reads where they are; flats of one slot do not take turns. A
    gather is reported as the bytes of its peers' shards that a rank is about to read. Collective over `group`; raises
    what SharedRegion does."""

    def __init__(
        self,
        flats: Sequence[Flat],
        group: dist.ProcessGroup,
        *,
        timeout_seconds: float,
        observer: CollectiveObserver | None = None,
    ) -> None:
        num_ranks = group.size()
        common_bytes = [num_ranks * flat.shard_bytes for flat in flats]
        region = _region(flats, group, timeout_seconds, observer, common_bytes=common_bytes)
        self._num_updates = 0
        super().__init__(
            region,
            flats,
            [
                region.common(index, 0, num_bytes).view(flats[index].dtype)
                for index, num_bytes in enumerate(common_bytes)
            ],
            # Storages of their own: a rank holds its shards, and no flat whole.
            [
                region.common(index, region.rank * flat.shard_bytes, flat.shard_bytes).view(flat.dtype)
                for index, flat in enumerate(flats)
            ],
        )

    def begin_update(self, meanwhile: Callable[[], None]) -> None:
        """See [Note: Shards are used where they lie]."""
        region, end_of_backward = self._region, len(self._flats)
        if region.is_null or region.num_ranks == 1:
            return
        self._num_updates += 1
        region.set(_Flag.FINISHED, end_of_backward, self._num_updates)
        region.launched("barrier", end_of_backward, torch.empty(0), 0)
        region.until_arrived(end_of_backward)
        with region.blocked(end_of_backward):
            region.until_all(_Flag.FINISHED, end_of_backward, self._num_updates, meanwhile)
        region.completed(end_of_backward)

    def _receive(self, index: int, epoch: int) -> None:
        self._region.until_all(_Flag.PUBLISHED, index, epoch)


def _region(
    flats: Sequence[Flat],
    group: dist.ProcessGroup,
    timeout_seconds: float,
    observer: CollectiveObserver | None,
    *,
    part_bytes: Sequence[int] = (),
    common_bytes: Sequence[int] = (),
) -> SharedRegion:
    return SharedRegion(
        part_bytes,
        group,
        common_bytes=common_bytes,
        flags=_Flag,
        things=[*(f"flat {index}" for index in range(len(flats))), "its backward"],
        purpose="parameters",
        timeout_seconds=timeout_seconds,
        observer=observer,
    )
