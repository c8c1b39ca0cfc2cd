"""Random numbers by region: each block of a model's chain starts from a state of its own, which follows from the
micro-batch and the block alone. Whoever computes a block draws the same numbers there, whether he has computed those
before it or not: one process, or a later stage of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import nn

_seed: ContextVar[int] = ContextVar("seed of the micro-batch that goes forward", default=0)


def begin(seed: int) -> None:
    """The forward of a micro-batch begins, or that of a part of it."""
    _seed.set(seed)
    torch.manual_seed(seed)


def give_states(blocks: Sequence[nn.Module]) -> None:
    """Has each of `blocks` start its forward from the state of its own. Computed again by torch's checkpoint, which
    keeps the state that it found, a block draws the same numbers again."""
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, place=index: _start(place))


def _start(place: int) -> None:
    # Apart from all micro-batches' own seeds, which count up by one.
    torch.manual_seed((_seed.get() * 1_000_003 + (place + 1) * 7919 + (1 << 61)) % (1 << 63))
