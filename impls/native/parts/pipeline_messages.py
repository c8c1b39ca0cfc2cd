"""What crosses the border between two stages: the tensors of one micro-batch, and on the way back their gradients.

Both sides know the shapes of each micro-batch beforehand (the plan of the step says them), so that nothing but the
tensors themselves travels, and micro-batches may differ in shape. What carries no gradient (a mask, indices) travels
forward only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.chain import TensorShape


class Messages:
    """Sends and receives of one rank along its pipeline. Everything is started without waiting; `arrived` waits for
    what is needed now, `end_step` for what this rank has sent. Tags tell the messages of a step apart, so that their
    order does not matter; where a library knows no tags (NCCL) it is the order of the schedule that pairs them. Without
    a `group` nothing travels: of use to subclasses alone."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sends: list[tuple[Any, Tensor]] = []
        self._receives: dict[tuple[int, int], list[tuple[Any, Tensor]]] = {}

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """`tensors` must stay as they are until the step ends; one after another, tags count up from `tag`."""
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                sent = tensor.detach().contiguous()
                work = dist.isend(sent, group=self._group, group_dst=peer, tag=tag + number)
                self._sends.append((work, sent))

    def expect(self, shapes: Sequence[TensorShape], peer: int, tag: int) -> None:
        """Makes room for what will come and starts to receive it; doing it again changes nothing."""
        if (peer, tag) in self._receives:
            return
        received = []
        for number, shape in enumerate(shapes):
            tensor = torch.empty(shape.shape, dtype=shape.dtype, device=self._device)
            work = None
            if tensor.numel():
                work = dist.irecv(tensor, group=self._group, group_src=peer, tag=tag + number)
            received.append((work, tensor))
        self._receives[peer, tag] = received

    def arrived(self, peer: int, tag: int) -> list[Tensor]:
        """What was expected, once it is there."""
        tensors = []
        for work, tensor in self._receives.pop((peer, tag)):
            if work is not None:
                work.wait()
            tensors.append(tensor)
        return tensors

    def end_step(self) -> None:
        """Everything this rank has sent has left."""
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()
        assert not self._receives, f"expected, but never asked for: {sorted(self._receives)}"


class NoMessages(Messages):
    """Sends nothing and waits for nobody: what peers would send reads as zeros."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        pass

    def expect(self, shapes: Sequence[TensorShape], peer: int, tag: int) -> None:
        if (peer, tag) not in self._receives:
            zeros = [torch.zeros(shape.shape, dtype=shape.dtype, device=self._device) for shape in shapes]
            self._receives[peer, tag] = [(None, tensor) for tensor in zeros]


class HeldMessages(NoMessages):
    """Sends nothing, but holds what it would send for as long."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        self._sends += [(None, tensor.detach().contiguous()) for tensor in tensors if tensor.numel()]
