"""Where a rank gathers its gradients, and how each rank gets the sum of its own shard: a reduce-scatter over the
process group or through shared memory (shared_gradients.py; Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models"). Who shards does not know which.

              rank 0's own        rank 1's own        rank 2's own            n = 3; S1 = a1 + b1 + c1, in this order
    before    | a0 | a1 | a2 |    | b0 | b1 | b2 |    | c0 | c1 | c2 |        whichever transport, on rank 1 only
    after     into: S0            into: S1            into: S2

Only the owner of a shard sums it, from the gradients themselves and never from +0.0: sums are the same bits over both
transports, and where every rank has -0.0 so has the sum (a marker, see [Note: Unused parameters]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from harness.implementation import CollectiveObserver, lending
from impls.native.parts import flat_memory, ordered_sum
from impls.native.parts.collectives import BackgroundCollectives, Handle
from impls.native.parts.shared_region import ALIGNMENT, round_up

_CPU = torch.device("cpu")
MAX_IN_FLIGHT = 2  # flats that a rank exchanges at a time: each needs room for its peers' pieces


@dataclass(frozen=True, kw_only=True)
class Flat:
    """One flat buffer cut into even shards, `num_shard_elements` for each rank of the group; the last may end in
    padding. Flats of one `slot` share memory: they take turns. A slot of `lent` flats has memory
    only from a flat's first gradient to the end of its exchange, if it is this rank's alone."""

    num_shard_elements: int
    dtype: torch.dtype
    slot: int
    lent: bool = False

    def __post_init__(self) -> None:
        if self.num_shard_elements < 0:
            raise ValueError(f"flat: expected a shard of at least 0 elements, got {self.num_shard_elements}")

    @property
    def shard_bytes(self) -> int:
        return self.num_shard_elements * self.dtype.itemsize

    def view(self, memory: Tensor, num_shards: int) -> Tensor:
        """(num_shards * num_shard_elements,) at the beginning of `memory`, which is uint8."""
        return memory[: num_shards * self.shard_bytes].view(self.dtype)

    def shard(self, full: Tensor, rank: int) -> Tensor:
        """(num_shard_elements,) of `full` (num_ranks * num_shard_elements,): the shard of the group's `rank`."""
        return full[rank * self.num_shard_elements : (rank + 1) * self.num_shard_elements]


Then = Callable[[], None]
"""What becomes of a sum; waits for nobody."""


class GradientShards(Protocol):
    """Sums of flat gradients over a group of ranks, of which each rank gets its own shard. Flats are numbered; every
    rank starts them in the same order."""

    def own(self, index: int) -> Tensor:
        """(num_ranks * num_shard_elements,): where this rank puts its gradients; zero at first."""
        ...

    def rest(self) -> None:
        """All views of what is lent have been made: its memory goes until the first flat of a slot is reclaimed."""
        ...

    def reclaim(self, index: int) -> None:
        """Returns once `own(index)` may be filled: whoever used its slot last has been summed by everybody."""
        ...

    def start(self, index: int, into: Tensor, *, add: bool, then: Then | None = None) -> None:
        """`own(index)` is filled; the sum of this rank's shard will be written to `into` (num_shard_elements,), or with
        `add` be added to it. `into` may be this very shard of `own(index)`, if nothing is to be added. Once the sum is
        there `then` is called, on whatever thread, in the order of the starts, and before `wait(index)` returns."""
        ...

    def progress(self) -> None:
        """Does whatever can be done for the sums in flight without waiting."""
        ...

    def wait(self, index: int) -> None:
        """Returns once `into` holds the sum."""
        ...

    def buffers(self) -> Iterable[Tensor]:
        """All memory of this rank's that it holds for the exchange, each storage once."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """A sum that this rank has started over the process group."""

    index: int
    works: Sequence[Any]
    shares: Sequence[Tensor]  # what is to be summed, or the sum alone, where the library has summed
    into: Tensor
    add: bool
    then: Then | None

    def sum(self) -> None:
        """Waits for all pieces, and sums them."""
        for work in self.works:
            work.wait()
        ordered_sum.write(self.shares, self.into, add=self.add)
        if self.then is not None:
            self.then()


class ProcessGroupShards:
    """Over torch.distributed. On the CPU each rank sends every peer its piece and sums what it receives itself: gloo's
    own reduce-scatter runs an all-reduce on a copy (64 MB over 2 ranks: 78 ms against 23). At most two flats are in
    flight, so that received pieces need little memory: to start a third finishes the oldest. gloo says that a message
    is complete only to whoever waits for it: where something comes after the sum, a thread waits, and sums."""

    def __init__(
        self,
        flats: Sequence[Flat],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        observer: CollectiveObserver | None = None,
    ) -> None:
        self._flats, self._group, self._observer = flats, group, observer
        self._rank, self._num_ranks = group.rank(), group.size()
        self._library_sums = device.type != "cpu"
        self._lent_slots = lent_slots(flats)
        self._slots = {
            slot: (flat_memory.lent if slot in self._lent_slots else flat_memory.zeros)(num_bytes, torch.uint8, device)
            for slot, num_bytes in slot_bytes(flats, self._num_ranks).items()
        }
        self._own = [flat.view(self._slots[flat.slot], self._num_ranks) for flat in flats]
        self._device = device
        self._in_flight: dict[int, _Exchange] = {}  # by index, the oldest first
        self._background = BackgroundCollectives("meshmark gradient shards")
        self._in_background: dict[int, Handle] = {}  # sums that the thread makes
        self._last_of_slot: dict[int, int] = {}

    def own(self, index: int) -> Tensor:
        return self._own[index]

    def rest(self) -> None:
        for slot in self._lent_slots:
            flat_memory.give_back(self._slots[slot])

    def reclaim(self, index: int) -> None:
        slot = self._flats[index].slot
        last = self._last_of_slot.get(slot)
        if last is not None:
            self.wait(last)  # what this rank sent has then left its memory
        if slot in self._lent_slots:
            num_bytes = self._num_ranks * self._flats[index].shard_bytes
            flat_memory.take(self._slots[slot], "communication_buffers", num_bytes)

    def start(self, index: int, into: Tensor, *, add: bool, then: Then | None = None) -> None:
        flat, own = self._flats[index], self._own[index]
        is_null = self._observer is not None and self._observer.null
        if sums_alone(flat, self._num_ranks, is_null=is_null):
            ordered_sum.write([flat.shard(own, self._rank)], into, add=add)
            self._give_back(index)
            if then is not None and self._library_sums:
                for earlier in list(self._in_flight.values()):
                    self._finish(earlier)
                then()
            elif then is not None:
                self._in_background[index] = self._background.start(then)  # behind those that came before
            return
        self.wait(index)
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._finish(next(iter(self._in_flight.values())))
        works, shares = self._begin(index, own, into, add=add)
        exchange = _Exchange(index=index, works=works, shares=shares, into=into, add=add, then=then)
        self._in_flight[index] = exchange
        if then is not None and not self._library_sums:
            self._in_background[index] = self._background.start(exchange.sum)
        self._last_of_slot[flat.slot] = index

    def progress(self) -> None:
        pass

    def wait(self, index: int) -> None:
        exchange = self._in_flight.get(index)
        if exchange is not None:
            # What comes after sums keeps to their order.
            while exchange.then is not None and (oldest := next(iter(self._in_flight.values()))) is not exchange:
                self._finish(oldest)
            self._finish(exchange)
        elif index in self._in_background:
            self._in_background.pop(index).wait()

    def buffers(self) -> Iterable[Tensor]:
        return list(self._slots.values())

    def close(self) -> None:
        self._in_flight.clear()
        self._background.close()

    def _begin(self, index: int, own: Tensor, into: Tensor, *, add: bool) -> tuple[list[Any], list[Tensor]]:
        """What is to be waited for, and then summed."""
        flat = self._flats[index]
        # What nobody reads before the sum is written there can take a piece.
        takes_one = not add and into.dtype == flat.dtype
        if self._library_sums:
            (landing,) = self._landings(flat, into, num_pieces=1, takes_one=takes_one)
            return [dist.reduce_scatter_single(landing, own, group=self._group, async_op=True)], [landing]
        in_own = into.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        landings = self._landings(flat, into, num_pieces=self._num_ranks - 1, takes_one=takes_one and not in_own)
        return self._swap_pieces(index, own, landings)

    def _landings(self, flat: Flat, into: Tensor, *, num_pieces: int, takes_one: bool) -> list[Tensor]:
        """Where pieces of the flat are received, each (num_shard_elements,); `takes_one` if `into` is one of them."""
        num_bytes = _piece_bytes(flat)
        with lending("communication_buffers"):
            staging = torch.empty((num_pieces - takes_one) * num_bytes, dtype=torch.uint8, device=self._device)
        staged = [flat.view(staging[begin:], 1) for begin in range(0, staging.numel(), num_bytes)]
        return [into, *staged] if takes_one else staged

    def _swap_pieces(self, index: int, own: Tensor, landings: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """Everything that is sent and received, and the shares of this rank's shard, in rank order."""
        flat = self._flats[index]
        works: list[Any] = []
        for distance in range(1, self._num_ranks):  # each to another one first
            peer = (self._rank + distance) % self._num_ranks
            works.append(dist.isend(flat.shard(own, peer), group=self._group, group_dst=peer, tag=index))
        for landing, peer in zip(landings, [r for r in range(self._num_ranks) if r != self._rank], strict=True):
            works.append(dist.irecv(landing, group=self._group, group_src=peer, tag=index))
        return works, [*landings[: self._rank], flat.shard(own, self._rank), *landings[self._rank :]]

    def _finish(self, exchange: _Exchange) -> None:
        if exchange.index in self._in_background:
            self._in_background.pop(exchange.index).wait()
        else:
            exchange.sum()
        del self._in_flight[exchange.index]
        self._give_back(exchange.index)

    def _give_back(self, index: int) -> None:
        slot = self._flats[index].slot
        if slot in self._lent_slots:
            flat_memory.give_back(self._slots[slot])


def slot_bytes(flats: Sequence[Flat], num_shards: int) -> dict[int, int]:
    """How much memory each slot needs for the largest of its flats, of which `num_shards` shards lie there."""
    sizes: dict[int, int] = {}
    for flat in flats:
        sizes[flat.slot] = max(sizes.get(flat.slot, 0), num_shards * flat.shard_bytes)
    return sizes


def lent_slots(flats: Sequence[Flat]) -> set[int]:
    """Slots all of whose flats are lent."""
    return {flat.slot for flat in flats} - {flat.slot for flat in flats if not flat.lent}


def staging_bytes(
    flat: Flat, num_ranks: int, *, takes_one: bool, shares_memory: bool, device: torch.device = _CPU
) -> int:
    """What a rank lends to peers' pieces of the flat, from the start of its sum to the end; `takes_one` if the place of
    the sum takes a piece: nothing is added to it, and it is not a part of what is sent."""
    if shares_memory or num_ranks == 1:
        return 0
    return _piece_bytes(flat) * ((1 if device.type != "cpu" else num_ranks - 1) - takes_one)


def _piece_bytes(flat: Flat) -> int:
    return round_up(flat.shard_bytes, ALIGNMENT)


def sums_alone(flat: Flat, num_ranks: int, *, is_null: bool) -> bool:
    """Without peers, and in a step that exchanges nothing, which goes on with this rank's own share: a sum that was
    never written would be whatever memory held."""
    return num_ranks == 1 or not flat.num_shard_elements or is_null
