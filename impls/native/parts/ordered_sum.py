"""Sums of several tensors in a fixed order, which leaves the same bits whoever computes them and memory sees each
tensor once.

Blocks stay in a core's own cache while they gather their summands. Nothing starts from +0.0: where every summand is
-0.0, so is the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impls.native.parts import flat_memory

BLOCK_BYTES = 1 << 18


def write(summands: Sequence[Tensor], into: Tensor, *, add: bool) -> None:
    """Writes ((summands[0] + summands[1]) + summands[2]) + ... to `into`, or with `add` adds it to what is there.

    All are (elements,); `into` may be one of the summands where nothing is to be added. Takes up to BLOCK_BYTES to work
    in. ValueError where `into` is of another size.
    """
    first, *others = summands
    if into.shape != first.shape:
        raise ValueError(f"sum: expected room for {tuple(first.shape)}, got {tuple(into.shape)}")
    if not others:
        if add:
            into.add_(first)
        elif into.data_ptr() != first.data_ptr():
            flat_memory.copy_into(into, first)
        return
    if len(others) == 1 and not add:
        torch.add(first, others[0], out=into)
        return
    num_elements = max(1, min(into.numel(), BLOCK_BYTES // first.itemsize))
    block = torch.empty(num_elements, dtype=first.dtype, device=first.device)
    for lower in range(0, into.numel(), block.numel()):
        here = slice(lower, min(lower + block.numel(), into.numel()))
        total = torch.add(first[here], others[0][here], out=block[: here.stop - lower])
        for summand in others[1:]:
            total.add_(summand[here])
        if add:
            into[here].add_(total)
        else:
            into[here].copy_(total)
