"""What crosses the borders between stages, through memory that all ranks of a pipeline map: whoever sends copies it
there and says so, whoever needs it copies it out and says that too. No thread of a library has to find a processor that
is not computing.

    for each message of a step   | tensor | tensor | ...     sent = step    it is there
                                                             taken = step   it may be overwritten
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from harness.chain import TensorShape
from harness.implementation import CollectiveObserver
from impls.native.parts.pipeline_messages import MAX_TENSORS, Messages
from impls.native.parts.shared_memory import TIMEOUT_SECONDS
from impls.native.parts.shared_region import ALIGNMENT, SharedRegion, round_up


class _Flag(IntEnum):
    SENT = 0
    TAKEN = 1


class SharedMessages(Messages):
    """The memory grows, on all ranks alike, when a step's messages need more than it has. TimeoutError names the rank
    that did not send."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, observer: CollectiveObserver | None = None
    ) -> None:
        super().__init__(group, device)
        self._observer = observer
        self._region: SharedRegion | None = None
        self._room: list[int] = []  # bytes of each message
        self._begins: list[int] = []
        self._step = 0
        self._last_sent: dict[int, int] = {}  # by message, the step
        self._expected: dict[int, tuple[Sequence[TensorShape], int]] = {}

    def begin_step(self, messages: Sequence[Sequence[TensorShape]]) -> None:
        self.make_room(messages)
        self._step += 1

    def make_room(self, messages: Sequence[Sequence[TensorShape]]) -> None:
        needed = [sum(round_up(shape.num_bytes, ALIGNMENT) for shape in message) for message in messages]
        if self._region is None or any(n > has for n, has in zip(needed, self._room, strict=True)):
            self._grow([max(n, has) for n, has in zip(needed, self._room or [0] * len(needed), strict=True)])

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        region, message = self._mapped(), tag // MAX_TENSORS
        if region.is_null:
            return
        shapes = [TensorShape.of(tensor) for tensor in tensors]
        places = self._places(message, shapes)
        region.launched("send", message, tensors[0], sum(shape.num_bytes for shape in shapes)) if tensors else None
        region.until_one(peer, _Flag.TAKEN, message, self._last_sent.get(message, 0))
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.detach())
        region.set(_Flag.SENT, message, self._step)
        self._last_sent[message] = self._step
        region.completed(message)

    def expect(self, shapes: Sequence[TensorShape], peer: int, tag: int) -> None:
        self._expected[tag // MAX_TENSORS] = shapes, peer

    def arrived(self, peer: int, tag: int) -> list[Tensor]:
        region, message = self._mapped(), tag // MAX_TENSORS
        shapes, _ = self._expected.pop(message)
        if region.is_null:
            return [torch.zeros(shape.shape, dtype=shape.dtype) for shape in shapes]
        places = self._places(message, shapes)
        region.launched("receive", message, places[0], 0) if places else None
        region.until_arrived(message)
        with region.blocked(message):
            region.until_one(peer, _Flag.SENT, message, self._step)
            received = [place.clone() for place in places]
        region.set(_Flag.TAKEN, message, self._step)
        region.completed(message)
        return received

    def end_step(self) -> None:
        assert not self._expected, f"expected, but never asked for: {sorted(self._expected)}"

    def buffers(self) -> Iterable[Tensor]:
        """The memory is all ranks', and counts as the first one's."""
        if self._region is None or self._region.rank:
            return ()
        return [self._region.common(0, 0, sum(self._room))]

    def close(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None

    def _mapped(self) -> SharedRegion:
        assert self._region is not None, "a step has begun"
        return self._region

    def _places(self, message: int, shapes: Sequence[TensorShape]) -> list[Tensor]:
        """Where the tensors of a message lie."""
        begins = accumulate((round_up(shape.num_bytes, ALIGNMENT) for shape in shapes), initial=self._begins[message])
        return [
            self._mapped().common(0, begin, shape.num_bytes).view(shape.dtype).view(shape.shape)
            for begin, shape in zip(begins, shapes, strict=False)
        ]

    def _grow(self, room: list[int]) -> None:
        """All ranks come here between the same steps; a step leaves no message untaken."""
        if self._region is not None:
            dist.barrier(group=self._group)  # the slowest may still be taking the last ones
            self._region.close()
        self._room, self._begins = room, list(accumulate(room, initial=0))
        self._step = 0
        self._last_sent.clear()
        self._region = SharedRegion(
            [],
            self._group,
            common_bytes=[sum(room)],
            flags=_Flag,
            things=[f"message {number}" for number in range(len(room))],
            purpose="messages between stages",
            timeout_seconds=TIMEOUT_SECONDS,
            observer=self._observer,
        )
