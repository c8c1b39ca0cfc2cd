"""Sums, gathers and scatters of activations within a tensor-parallel group, over the process group or through shared
memory. One is under way at a time: whoever starts one finishes it before the next.

                    rank 0 has   rank 1 has            rank 0 gets   rank 1 gets
    sum             a            b                     a + b         a + b
    gather          a            b                     a | b         a | b            along one dim
    scatter_sum     a0 | a1      b0 | b1               a0 + b0       a1 + b1          along one dim

Summands are added in rank order, so all ranks get the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.implementation import CollectiveObserver
from impls.native.parts.shared_region import SharedRegion

Finish = Callable[[], Tensor]
"""Waits for what was started, and gives what this rank gets: memory that is the caller's."""


class TensorExchange(ABC):
    """What a group of `num_ranks` exchanges; `rank` is this one's place in it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.num_ranks = group.rank(), group.size()
        self._group = group

    @abstractmethod
    def room(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Where this rank can put what it sends next, of the dtype and on the device of `like`: what lies there travels
        without a copy."""

    @abstractmethod
    def start_sum(self, own: Tensor) -> Finish:
        """The sum of the ranks' `own`, which are alike in shape and contiguous."""

    @abstractmethod
    def start_gather(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Finish:
        """The ranks' `own` one after another along `dim`, of which they have `sizes`."""

    @abstractmethod
    def start_scatter_sum(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Finish:
        """Of the sum of the ranks' `own` this rank's piece along `dim`; `sizes` are those of all ranks."""

    def buffers(self) -> Iterable[Tensor]:
        """What this rank holds for it between exchanges."""
        return ()

    def close(self) -> None:  # noqa: B027  most have nothing to release
        """Releases what outlives the object."""


class ProcessGroupExchange(TensorExchange):
    """Over torch.distributed. Ranks send each other their pieces: gloo's own reduce-scatter and all-gather are slower
    (parts/gradient_shards.py, parts/parameter_gathers.py)."""

    def room(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def start_sum(self, own: Tensor) -> Finish:
        work = dist.all_reduce(own, group=self._group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return own

        return finish

    def start_gather(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Finish:
        pieces = [own if rank == self.rank else own.new_empty(_with(own, dim, n)) for rank, n in enumerate(sizes)]
        own = own.contiguous()
        pieces[self.rank] = own
        works = [
            dist.broadcast(piece, group=self._group, group_src=rank, async_op=True)
            for rank, piece in enumerate(pieces)
            if piece.numel()
        ]

        def finish() -> Tensor:
            for work in works:
                work.wait()
            return torch.cat(pieces, dim)

        return finish

    def start_scatter_sum(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Finish:
        pieces = own.split(list(sizes), dim)
        mine = pieces[self.rank]
        summands = [mine if rank == self.rank else own.new_empty(mine.shape) for rank in range(self.num_ranks)]
        works, sent = self._receive(summands, range(self.rank)), []  # [Note: Pairs of messages], parts/collectives.py
        for distance in range(1, self.num_ranks):  # each to another one first
            peer = (self.rank + distance) % self.num_ranks
            if pieces[peer].numel():
                sent.append(pieces[peer].contiguous())
                works.append(dist.isend(sent[-1], group=self._group, group_dst=peer))
        works += self._receive(summands, range(self.rank + 1, self.num_ranks))

        def finish() -> Tensor:
            for work in works:
                if work is not None:
                    work.wait()
            return _sum(summands)

        return finish

    def _receive(self, summands: Sequence[Tensor], peers: Sequence[int]) -> list[Any]:
        return [
            dist.irecv(summands[peer], group=self._group, group_src=peer) for peer in peers if summands[peer].numel()
        ]


class _Flag(IntEnum):
    PUBLISHED = 0


class SharedMemoryExchange(TensorExchange):
    """Through memory that all ranks map: each puts what it sends into one of its two slots, and reads its peers'.

    [Note: Two slots] A rank writes to a slot again in the exchange after the next. By then it has finished the one in
    between, for which every peer had to publish, and peers publish one exchange after they have finished the last.

    The slots grow, all ranks' alike, when an exchange needs more than they have: exchanges are of one size on all ranks
    but for pieces along a dim, so that the largest piece counts. TimeoutError names the rank that did not come.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, timeout_seconds: float, observer: CollectiveObserver | None = None
    ) -> None:
        super().__init__(group)
        self._timeout_seconds, self._observer = timeout_seconds, observer
        self._region: SharedRegion | None = None
        self._slot_bytes = 0
        self._epoch = 0

    def room(self, shape: Sequence[int], like: Tensor) -> Tensor:
        num_bytes = torch.Size(shape).numel() * like.itemsize
        return self._in_slot(self.rank, shape, like.dtype, num_bytes)

    def start_sum(self, own: Tensor) -> Finish:
        mine = self._publish("all_reduce", own, own.nbytes, 2 * (self.num_ranks - 1) * own.nbytes // self.num_ranks)
        return lambda: self._finish(lambda: _sum(self._of_ranks([own.shape] * self.num_ranks, own.dtype)), mine.clone)

    def start_gather(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Finish:
        shapes = [_with(own, dim, size) for size in sizes]
        largest = max(torch.Size(shape).numel() for shape in shapes) * own.itemsize
        others = sum(torch.Size(s).numel() for rank, s in enumerate(shapes) if rank != self.rank) * own.itemsize
        mine = self._publish("all_gather", own, largest, others)

        def alone() -> Tensor:
            pieces = [mine if rank == self.rank else own.new_zeros(shape) for rank, shape in enumerate(shapes)]
            return torch.cat(pieces, dim)

        return lambda: self._finish(lambda: torch.cat(self._of_ranks(shapes, own.dtype), dim), alone)

    def start_scatter_sum(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Finish:
        start, size = sum(sizes[: self.rank]), sizes[self.rank]
        piece_bytes = own.nbytes // max(1, own.shape[dim]) * size
        mine = self._publish("reduce_scatter", own, own.nbytes, (self.num_ranks - 1) * piece_bytes)

        def pieces() -> list[Tensor]:
            return [one.narrow(dim, start, size) for one in self._of_ranks([own.shape] * self.num_ranks, own.dtype)]

        return lambda: self._finish(lambda: _sum(pieces()), mine.narrow(dim, start, size).clone)

    def buffers(self) -> Iterable[Tensor]:
        return () if self._region is None else [self._region.part(self.rank, slot) for slot in range(2)]

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None

    def _publish(self, operation: str, own: Tensor, slot_bytes: int, read_bytes: int) -> Tensor:
        """Has `own` in this rank's slot, and says so. Nothing at all in a step that exchanges nothing."""
        slot = self._in_slot(self.rank, own.shape, own.dtype, slot_bytes)
        region = self._region
        assert region is not None
        if region.is_null:
            return own
        if slot.data_ptr() != own.data_ptr():
            slot.copy_(own)
        self._epoch += 1
        region.launched(operation, 0, own, read_bytes)
        region.set(_Flag.PUBLISHED, 0, self._epoch)
        return slot

    def _finish(self, result: Callable[[], Tensor], alone: Callable[[], Tensor]) -> Tensor:
        """`alone` makes something of the same shape, in a step that exchanges nothing."""
        region = self._region
        assert region is not None
        if region.is_null:
            return alone()
        region.until_arrived(0)
        with region.blocked(0):
            region.until_all(_Flag.PUBLISHED, 0, self._epoch)
            made = result()
        region.completed(0)
        return made

    def _of_ranks(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """What each rank has published last."""
        assert self._region is not None
        slot = self._epoch % 2
        return [
            self._region.part(rank, slot)[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for rank, shape in enumerate(shapes)
        ]

    def _in_slot(self, rank: int, shape: Sequence[int], dtype: torch.dtype, slot_bytes: int) -> Tensor:
        """Room in the slot of the next exchange."""
        if slot_bytes > self._slot_bytes or self._region is None:
            self._grow(slot_bytes)
        assert self._region is not None
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._region.part(rank, (self._epoch + 1) % 2)[:num_bytes].view(dtype).view(tuple(shape))

    def _grow(self, slot_bytes: int) -> None:
        """All ranks come here in the same exchange, and nobody needs what lies in the slots any more: see [Note: Two
        slots]."""
        if self._region is not None:
            dist.barrier(group=self._group)  # the slowest may still be reading
            self._region.close()
        self._slot_bytes = max(slot_bytes, 1)
        self._epoch = 0
        self._region = SharedRegion(
            [self._slot_bytes] * 2,
            self._group,
            flags=_Flag,
            things=["its activations"],
            purpose="activations",
            timeout_seconds=self._timeout_seconds,
            observer=self._observer,
        )


def _sum(summands: Sequence[Tensor]) -> Tensor:
    first, *others = summands
    if not others:
        return first.clone()
    total = torch.add(first, others[0])
    for summand in others[1:]:
        total += summand
    return total


def _with(tensor: Tensor, dim: int, size: int) -> list[int]:
    """The shape of `tensor` with another size along `dim`."""
    shape = list(tensor.shape)
    shape[dim] = size
    return shape
