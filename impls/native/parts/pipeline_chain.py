"""A model as a chain of blocks that can be cut into stages: which blocks a stage has, what crosses its borders.

Each block takes what the one before gives and nothing else. A pass without values checks that: a block that looks at
what an earlier one has made, past the border, is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.workload import Workload
from impls.native.parts.pipeline_messages import Border, TensorShape
from impls.native.parts.tensors_in_use import Operations, tensors_in

_META = torch.device("meta")


def run_blocks(blocks: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What comes out of `blocks`, one after another, as in nn.Sequential: several tensors are one tuple."""
    value: Any = inputs[0] if len(inputs) == 1 else tuple(inputs)
    for block in blocks:
        value = block(value)
    return as_tensors(value)


def as_tensors(value: Any) -> list[Tensor]:
    """ValueError for what cannot cross a border."""
    tensors = list(value) if isinstance(value, tuple | list) else [value]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"pipeline: blocks may hand on tensors, got {type(tensor).__name__}")
    return tensors


def borders(workload: Workload, model: nn.Module, inputs: Tensor) -> tuple[Border, ...]:
    """What each block of the chain but the last hands to the next, for a micro-batch like `inputs`; `model` is the
    workload's, without memory. ValueError where a block needs more than that, or cannot be run without values."""
    assert workload.chain is not None
    blocks = list(workload.chain(model))
    names = _names(model, blocks)
    made_by: dict[int, int] = {}  # storage: the block that made it
    kept: list[Tensor] = []  # so that no storage's address is used twice
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    handed: list[Tensor] = [inputs.to(_META)]
    found: list[Border] = []
    for index, block in enumerate(blocks):
        allowed = known | {tensor.untyped_storage()._cdata for tensor in handed}

        def note(value: object, index: int = index, allowed: set[int] = allowed) -> None:
            for tensor in tensors_in(value):
                storage = tensor.untyped_storage()._cdata
                if storage not in allowed and made_by.get(storage, index) != index:
                    raise SkipConnection(
                        f"pipeline: {names[index]} uses what {names[made_by[storage]]} has made, past the blocks "
                        f"between them"
                    )

        def made(value: object, index: int = index) -> None:
            for tensor in tensors_in(value):
                made_by.setdefault(tensor.untyped_storage()._cdata, index)
                kept.append(tensor)

        with torch.device(_META), Operations(note, made):
            handed = run_blocks([block], handed)
        found.append(tuple(map(TensorShape.of, handed)))
    return tuple(found[:-1])


class SkipConnection(ValueError):
    """A model that is no chain."""


def _names(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    by_module = {module: name for name, module in model.named_modules()}
    return [by_module.get(block, f"block {index}") for index, block in enumerate(blocks)]
