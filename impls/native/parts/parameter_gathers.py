"""How flat parameters become whole from their owners' shards: an all-gather. Here over the process group; through
shared memory in parts/shared_parameters.py. Who shards does not know which.

    keeps_full    stages 1, 2: full(i) of its own for every flat, which lasts; shard(i) is this rank's part of it
                       rank 0's full    | A0 | A1 |      rank 1's full    | A0 | A1 |
                       its shard          ^^                                   ^^
    otherwise     stage 3: shards are memory of their own; full(i) is lent by the slot, until its next flat is gathered
                       rank 0's shards  | A0 | B0 | C0 |      its slots  | A0 | A1 |   | B0 | B1 |   C takes A's turn
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from impls.native.parts import flat_memory
from impls.native.parts.gradient_shards import Flat, slot_bytes


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

    def begin_update(self, meanwhile: Callable[[], None]) -> None:
        """This rank looks at no `full` any more until it gathers it again. Returns once it may write to its shards, and
        does `meanwhile` again and again until then."""
        ...

    def start(self, index: int) -> None:
        """Begins to gather, into `full(index)`."""
        ...

    def wait(self, index: int) -> None:
        """Returns once `full(index)` is whole."""
        ...

    def release(self, index: int) -> None:
        """This rank looks at `full(index)` no more until it gathers it again: memory that is lent may go."""
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
        check_slots(flats, keeps_full=keeps_full)
        self._flats, self._group = flats, group
        self._rank, self._num_ranks = group.rank(), group.size()
        self._library_gathers = device.type != "cpu"
        make = flat_memory.zeros if keeps_full else flat_memory.lent
        self._slots = {
            slot: make(num_bytes, torch.uint8, device) for slot, num_bytes in slot_bytes(flats, self._num_ranks).items()
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

    def begin_update(self, meanwhile: Callable[[], None]) -> None:
        pass  # everyone reads copies

    def start(self, index: int) -> None:
        flat, full, shard = self._flats[index], self._fulls[index], self._shards[index]
        if not flat.num_shard_elements:
            return
        if not self._keeps_full:
            flat_memory.take(self._slots[flat.slot], "communication_buffers", self._num_ranks * flat.shard_bytes)
        if self._num_ranks > 1 and self._library_gathers:
            self._works[index] = [dist.all_gather_single(full, shard, group=self._group, async_op=True)]
            return
        if not self._keeps_full:
            flat_memory.copy_into(flat.shard(full, self._rank), shard)
        if self._num_ranks > 1:
            self._works[index] = self._begin(index)

    def wait(self, index: int) -> None:
        for work in self._works.pop(index, ()):
            work.wait()

    def release(self, index: int) -> None:
        flat_memory.give_back(self._slots[self._flats[index].slot])

    def buffers(self) -> Iterable[Tensor]:
        return [] if self._keeps_full else list(self._slots.values())

    def close(self) -> None:
        self._works.clear()

    def _begin(self, index: int) -> list[Any]:
        """This rank's shard is in its place: what is to be waited for."""
        flat, full = self._flats[index], self._fulls[index]
        return [
            dist.broadcast(flat.shard(full, owner), group=self._group, group_src=owner, async_op=True)
            for owner in range(self._num_ranks)
        ]


def check_slots(flats: Sequence[Flat], *, keeps_full: bool) -> None:
    num_slots = len({flat.slot for flat in flats})
    if keeps_full and num_slots != len(flats):
        raise ValueError(f"flats that are kept whole cannot take turns: expected {len(flats)} slots, got {num_slots}")
