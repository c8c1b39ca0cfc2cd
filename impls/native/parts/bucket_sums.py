"""Where a rank puts the gradients of its buckets, and how they become sums over the ranks: over the process group or
through shared memory. Data parallel does not know which.

The sum of a bucket is told as pieces (start, stop, tensor): over the process group one piece, this rank's own buffer;
through shared memory one from each rank's memory, to be read and not written, until `release`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from impls.native.parts import collectives, flat_memory
from impls.native.parts.collectives import Handle
from impls.native.parts.shared_memory import SharedBuffers


class Piece(NamedTuple):
    """Elements [start, stop) of a bucket, in `values` (stop - start,)."""

    start: int
    stop: int
    values: Tensor


class BucketSums(Protocol):
    """Sums of buckets over ranks, numbered; every rank starts them in the same order."""

    def own(self, index: int) -> Tensor:
        """This rank's buffer (elements,) of the bucket."""
        ...

    def reclaim(self, index: int) -> None:
        """Returns once nobody reads this rank's buffer any more: before the first write of a step, and before a write
        to a collected sum."""
        ...

    def start(self, index: int) -> None:
        """This rank's buffer is filled; its sum begins."""
        ...

    def progress(self) -> None:
        """Does whatever can be done for the sums in flight without waiting."""
        ...

    def wait(self, index: int) -> Sequence[Piece]:
        """Returns once the sum is there."""
        ...

    def release(self, index: int) -> None:
        """This rank has read the pieces."""
        ...

    def collect(self, index: int) -> None:
        """Brings the whole sum into this rank's own buffer, and releases the pieces. Between steps too."""
        ...

    def close(self) -> None: ...


class ProcessGroupSums:
    """Sums in this rank's own memory, by a collective of torch.distributed or by `composed`, one of several steps."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, torch.dtype]],
        group: dist.ProcessGroup,
        device: torch.device,
        composed: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._buffers = [flat_memory.zeros(num_elements, dtype, device) for num_elements, dtype in shapes]
        self._group = group
        self._composed = composed
        self._background = collectives.BackgroundCollectives("meshmark sums")
        self._handles: dict[int, Handle] = {}

    def own(self, index: int) -> Tensor:
        return self._buffers[index]

    def reclaim(self, index: int) -> None:
        pass

    def start(self, index: int) -> None:
        buffer = self._buffers[index]
        if self._composed is not None:
            self._handles[index] = self._background.start(self._composed, buffer)
            return
        work: Any = dist.all_reduce(buffer, group=self._group, async_op=True)
        self._handles[index] = work

    def progress(self) -> None:
        pass

    def wait(self, index: int) -> Sequence[Piece]:
        self._handles.pop(index).wait()
        buffer = self._buffers[index]
        return [Piece(0, buffer.numel(), buffer)]

    def release(self, index: int) -> None:
        pass

    def collect(self, index: int) -> None:
        pass

    def close(self) -> None:
        self._background.close()


class OwnShares(ProcessGroupSums):
    """Every rank's own share in the place of the sum: nothing is exchanged."""

    def start(self, index: int) -> None:
        pass

    def wait(self, index: int) -> Sequence[Piece]:
        return [Piece(0, self.own(index).numel(), self.own(index))]


class SharedMemorySums:
    """Sums in memory that all ranks map; see parts/shared_memory.py."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self._buffers = buffers

    def own(self, index: int) -> Tensor:
        return self._buffers.own(index)

    def reclaim(self, index: int) -> None:
        self._buffers.reclaim(index)

    def start(self, index: int) -> None:
        self._buffers.publish(index)

    def progress(self) -> None:
        self._buffers.progress()

    def wait(self, index: int) -> Sequence[Piece]:
        self._buffers.wait(index)
        return [Piece(*piece) for piece in self._buffers.sums(index)]

    def release(self, index: int) -> None:
        self._buffers.release(index)

    def collect(self, index: int) -> None:
        self._buffers.collect(index)

    def close(self) -> None:
        self._buffers.close()
