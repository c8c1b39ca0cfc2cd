"""Buffers of a model (BatchNorm's running statistics, say) brought from the first rank to all others, once a step.

Models have many small ones, and each collective costs the same however little it carries: small buffers of all dtypes
travel together as bytes, the widest elements first, so that every one lies where its dtype wants it.

    int64 | n1 | n2 |  fp32 | mean1 | var1 | mean2 | var2 |  bool | mask |      one broadcast; no padding
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_LARGE_BYTES = 1 << 16  # from here on two copies cost more than a collective of its own


class BufferBroadcasts:
    """The buffers of `model` on one rank of `group`. What a rank holds in their place is read anew in every step, since
    a module may put a new tensor there in any forward; all ranks must hold like shapes and dtypes."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        found: dict[Tensor, tuple[nn.Module, str]] = {}
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                found.setdefault(buffer, (module, name))
        self._places = list(found.values())
        self._group = group
        self._in_flight: list[Any] = []
        self._packed: list[Tensor] = []
        self._views: list[Tensor] = []

    def broadcast(self) -> None:
        """The first rank's buffers win."""
        self.start()
        self.finish()

    @torch.no_grad()
    def start(self) -> None:
        """Begins to bring over what the first rank's buffers hold now; until `finish` nobody may change any."""
        self._packed = []
        for module, name in self._places:
            buffer = module._buffers.get(name)
            if buffer is None or not buffer.numel():
                continue
            if buffer.is_contiguous() and buffer.nbytes >= _LARGE_BYTES:
                self._send(buffer)
            else:
                self._packed.append(buffer)
        if self._packed:
            self._packed.sort(key=lambda buffer: -buffer.itemsize)
            flat = torch.empty(
                sum(buffer.nbytes for buffer in self._packed), dtype=torch.uint8, device=self._packed[0].device
            )
            self._views = _views_of(flat, self._packed)
            torch._foreach_copy_(self._views, self._packed)
            self._send(flat)

    @torch.no_grad()
    def finish(self) -> None:
        """Returns once every buffer holds what the first rank's did."""
        for work in self._in_flight:
            work.wait()
        if self._packed and self._group.rank() != 0:
            torch._foreach_copy_(self._packed, self._views)
        self._in_flight, self._packed, self._views = [], [], []

    def _send(self, tensor: Tensor) -> None:
        self._in_flight.append(dist.broadcast(tensor, group=self._group, group_src=0, async_op=True))


def _views_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The pieces of `flat` (bytes,) one after another, each with the dtype and shape of one of `like`."""
    views, start = [], 0
    for dtype, group in groupby(like, key=lambda tensor: tensor.dtype):
        alike = list(group)
        stop = start + sum(tensor.nbytes for tensor in alike)
        pieces = flat[start:stop].view(dtype).split([tensor.numel() for tensor in alike])
        views += [
            piece if tensor.ndim == 1 else piece.view(tensor.shape) for piece, tensor in zip(pieces, alike, strict=True)
        ]
        start = stop
    return views
