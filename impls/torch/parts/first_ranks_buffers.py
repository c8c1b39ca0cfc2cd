"""Buffers of a model (BatchNorm's running statistics, say) brought from the first data rank to all others."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor


def broadcast_buffers(buffers: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """The first rank's win. Collective over `group`; all ranks hold like shapes and dtypes."""
    in_flight = []
    for buffer in buffers:
        sent = buffer.contiguous()  # a collective takes a buffer's memory for its elements in order
        in_flight.append((dist.broadcast(sent, group=group, group_src=0, async_op=True), buffer, sent))
    for work, buffer, sent in in_flight:
        assert work is not None
        work.wait()
        if sent is not buffer:
            buffer.copy_(sent)
