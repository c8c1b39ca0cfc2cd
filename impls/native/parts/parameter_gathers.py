"""How flat parameters become whole from their owners' shards: an all-gather over the process group or through shared
memory. Who shards does not know which.

    keeps_full    stages 1, 2: full(i) of its own for every flat, which lasts; shard(i) is this rank's part of it
                       rank 0's full    | A0 | A1 |      rank 1's full    | A0 | A1 |
                       its shard          ^^                                   ^^
    otherwise     stage 3: shards are memory of their own; full(i) is lent by the slot, until its next flat is gathered
                       rank 0's shards  | A0 | B0 | C0 |      its slots  | A0 | A1 |   | B0 | B1 |   C takes A's turn

[Note: Shards are read unguarded] Nobody asks whether a peer has finished reading a shard before its owner updates it
again. An update needs the sum of the flat's gradients, so every rank has published these; and every rank has finished
its gather of a flat before it publishes that flat's next gradients. Whoever gathers between steps finishes before the
next step begins, likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from harness.implementation import CollectiveObserver
from impls.native.parts import flat_memory
from impls.native.parts.gradient_shards import Flat, slot_bytes
from impls.native.parts.shared_region import SharedRegion


class ParameterGathers(Protocol):
    """Flat parameters, gathered from their owners' shards. Flats are numbered; every rank starts its gathers in the
    same order."""

    def shard(self, index: int) -> Tensor:
        """(num_shard_elements,): this rank's shard, zero at first; the optimizer updates it in place."""
        ...

    def full(self, index: int) -> Tensor:
        """(num_ranks * num_shard_elements,): where the gathered parameters land."""
        ...

    def publish(self, index: int) -> None:
        """This rank's shard has been written: peers may read it. All ranks call it equally often, the first time before
        the first gather."""
        ...

    def start(self, index: int) -> None:
        """Begins to gather, into `full(index)`."""
        ...

    def wait(self, index: int) -> None:
        """Returns once `full(index)` is whole."""
        ...

    def buffers(self) -> Iterable[Tensor]:
        """The memory that is lent to flats in turn, each storage once; none where every flat keeps its own."""
        ...

    def close(self) -> None: ...


class ProcessGroupGathers:
    """Over torch.distributed. On the CPU each owner broadcasts its shard to where it belongs: gloo's own all-gather
    goes through copies (64 MB over 2 ranks: 65 ms against 19)."""

    def __init__(
        self, flats: Sequence[Flat], group: dist.ProcessGroup, device: torch.device, *, keeps_full: bool
    ) -> None:
        _check_slots(flats, keeps_full=keeps_full)
        self._flats, self._group = flats, group
        self._rank, self._num_ranks = group.rank(), group.size()
        self._library_gathers = device.type != "cpu"
        self._slots = {
            slot: flat_memory.zeros(num_bytes, torch.uint8, device)
            for slot, num_bytes in slot_bytes(flats, self._num_ranks).items()
        }
        self._keeps_full = keeps_full
        self._fulls = [flat.view(self._slots[flat.slot], self._num_ranks) for flat in flats]
        self._shards = [
            flat.shard(full, self._rank)
            if keeps_full
            else flat_memory.zeros(flat.num_shard_elements, flat.dtype, device)
            for flat, full in zip(flats, self._fulls, strict=True)
        ]
        self._works: dict[int, list[Any]] = {}

    def shard(self, index: int) -> Tensor:
        return self._shards[index]

    def full(self, index: int) -> Tensor:
        return self._fulls[index]

    def publish(self, index: int) -> None:
        pass  # nothing is read before its owner starts the gather too

    def start(self, index: int) -> None:
        flat, full, shard = self._flats[index], self._fulls[index], self._shards[index]
        if not flat.num_shard_elements:
            return
        if self._num_ranks > 1 and self._library_gathers:
            self._works[index] = [dist.all_gather_single(full, shard, group=self._group, async_op=True)]
            return
        if not self._keeps_full:
            flat_memory.copy_into(flat.shard(full, self._rank), shard)
        if self._num_ranks > 1:
            self._works[index] = [
                dist.broadcast(flat.shard(full, owner), group=self._group, group_src=owner, async_op=True)
                for owner in range(self._num_ranks)
            ]

    def wait(self, index: int) -> None:
        for work in self._works.pop(index, ()):
            work.wait()

    def buffers(self) -> Iterable[Tensor]:
        return [] if self._keeps_full else list(self._slots.values())

    def close(self) -> None:
        self._works.clear()


class _Flag(IntEnum):
    PUBLISHED = 0


class SharedMemoryGathers:
    """Through memory that all ranks map (parts/shared_region.py): each rank copies its peers' shards from where they
    live, the optimizer's own memory, as soon as their owners have updated them. Collective over `group`; raises what
    SharedRegion does."""

    def __init__(
        self,
        flats: Sequence[Flat],
        group: dist.ProcessGroup,
        *,
        keeps_full: bool,
        timeout_seconds: float,
        observer: CollectiveObserver | None = None,
    ) -> None:
        _check_slots(flats, keeps_full=keeps_full)
        num_ranks = group.size()
        self._region = SharedRegion(
            [flat.shard_bytes * (num_ranks if keeps_full else 1) for flat in flats],
            group,
            flags=_Flag,
            num_flagged=len(flats),
            noun="flat",
            purpose="parameters",
            timeout_seconds=timeout_seconds,
            observer=observer,
        )
        self._flats = flats
        self._rank, self._num_ranks = self._region.rank, num_ranks
        self._slots: dict[int, Tensor] = {}
        if not keeps_full:
            cpu = torch.device("cpu")
            self._slots = {
                slot: flat_memory.zeros(num_bytes, torch.uint8, cpu)
                for slot, num_bytes in slot_bytes(flats, num_ranks).items()
            }
        self._fulls: list[Tensor] = []
        self._shards: list[list[Tensor]] = []  # of each flat, of each owner, where the owner keeps it
        for index, flat in enumerate(flats):
            if keeps_full:
                fulls = self._region.tensors(index, num_ranks * flat.num_shard_elements, flat.dtype)
                self._fulls.append(fulls[self._rank])
                self._shards.append([flat.shard(full, owner) for owner, full in enumerate(fulls)])
            else:
                self._fulls.append(flat.view(self._slots[flat.slot], num_ranks))
                self._shards.append(self._region.tensors(index, flat.num_shard_elements, flat.dtype))
        self._keeps_full = keeps_full
        self._epochs = [0] * len(flats)
        self._awaited: dict[int, int] = {}  # the epoch of each flat that is being gathered

    def shard(self, index: int) -> Tensor:
        return self._shards[index][self._rank]

    def full(self, index: int) -> Tensor:
        return self._fulls[index]

    def publish(self, index: int) -> None:
        self._epochs[index] += 1
        self._region.set(_Flag.PUBLISHED, index, self._epochs[index])

    def start(self, index: int) -> None:
        if self._region.is_null and self._num_ranks > 1:
            return
        self._awaited[index] = self._epochs[index]
        if self._num_ranks > 1:
            read = (self._num_ranks - 1) * self._flats[index].shard_bytes
            self._region.launched("all_gather", index, self._fulls[index], read)

    def wait(self, index: int) -> None:
        """Copies shard by shard, its own first: ranks start at different owners, and nobody waits for the slowest
        before the others' are done."""
        epoch = self._awaited.pop(index, None)
        if epoch is None:
            return
        flat, full, shards = self._flats[index], self._fulls[index], self._shards[index]
        self._region.until_arrived(index)
        with self._region.blocked(index):
            for distance in range(1 if self._keeps_full else 0, self._num_ranks):
                owner = (self._rank + distance) % self._num_ranks
                self._region.until_one(owner, _Flag.PUBLISHED, index, epoch)
                flat_memory.copy_into(flat.shard(full, owner), shards[owner])
        if self._num_ranks > 1:
            self._region.completed(index)

    def buffers(self) -> Iterable[Tensor]:
        return list(self._slots.values())

    def close(self) -> None:
        """Gives up the views; the memory goes when the last tensor on it does."""
        self._fulls.clear()
        self._shards.clear()
        self._awaited.clear()
        self._region.close()


def _check_slots(flats: Sequence[Flat], *, keeps_full: bool) -> None:
    num_slots = len({flat.slot for flat in flats})
    if keeps_full and num_slots != len(flats):
        raise ValueError(f"flats that are kept whole cannot take turns: expected {len(flats)} slots, got {num_slots}")
