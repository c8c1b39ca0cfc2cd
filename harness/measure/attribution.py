"""Which category each block of memory belongs to.

Each block gets one:

    parameters, gradients,     the implementation lists a tensor in it after some step; where several categories claim
    optimizer_states,          one block, the first in this order has it
    communication_buffers      or not listed, born in a mark of `harness.implementation.lending`
    activations                not listed, born in a forward mark, outlives the mark, dies before its step ends
    gradients                  not listed, born in a backward mark, outlives the mark, dies before its step ends
    other                      the rest: batches, temporaries of a kernel, gradients of activations, unlisted buffers

Parameters that a sharding strategy gathers in forward and keeps for backward look like activations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from harness.implementation import Phase
from harness.measure.allocations import Block, Mark, Timeline
from harness.parameters import MEMORY_CATEGORIES, MemoryCategory

Category = MemoryCategory | Literal["activations", "other"]
CATEGORIES: tuple[Category, ...] = (*MEMORY_CATEGORIES, "activations", "other")

MARK_PREFIX = "meshmark."
STEP_MARK = "meshmark.step"
LIST_MARK = "meshmark.memory_tensors"
_PHASE_PRODUCTS: Mapping[Phase, Category] = {"forward": "activations", "backward": "gradients"}

Span = tuple[int, int]
"""Address and bytes of one storage."""


def storages(tensors: Iterable[Tensor], device: torch.device) -> Iterator[Span]:
    """Address and bytes of the storage of each tensor that lies on `device`."""
    for tensor in tensors:
        # A DTensor is a description without memory; its local tensor has the storage. It takes long to import.
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if local.device.type == device.type and storage.nbytes():
            yield storage.data_ptr(), storage.nbytes()


def phase_marks(timeline: Timeline, phase: Phase, within: Mark) -> list[Mark]:
    """The marks of `phase` that lie in the interval of `within`."""
    marks = timeline.marked(f"{MARK_PREFIX}{phase}")
    return [mark for mark in marks if within.begin <= mark.begin and mark.end <= within.end]


def by_category(
    timeline: Timeline, listed: Sequence[Mapping[MemoryCategory, Sequence[Span]]]
) -> tuple[dict[Category, list[Block]], dict[Category, int]]:
    """Each block of the timeline under its category, and the bytes of each category that lie in no block of it (those
    of the last step, each address once)."""
    addresses = _Addresses(timeline.blocks)
    category_of: dict[Block, Category] = {}
    unseen: list[tuple[int, int, Category]] = []  # (first address, end, category)
    moments = [mark.begin for mark in timeline.marked(LIST_MARK)]
    for listed_as in MEMORY_CATEGORIES:
        for moment, spans_of in zip(moments, listed, strict=True):
            for address, num_bytes in spans_of.get(listed_as, ()):
                if block := addresses.find(address, moment):
                    category_of.setdefault(block, listed_as)
                elif moment == moments[-1]:
                    unseen.append((address, address + num_bytes, listed_as))
    for block, category in _born_in_marks(timeline, addresses):
        category_of.setdefault(block, category)
    seen = [category for category in CATEGORIES if _is_told_apart(category, timeline, listed)]
    blocks: dict[Category, list[Block]] = {category: [] for category in seen}
    for block in timeline.blocks:
        blocks[category_of.get(block, "other")].append(block)
    return blocks, _bytes_once(unseen)


def _is_told_apart(
    category: Category, timeline: Timeline, listed: Sequence[Mapping[MemoryCategory, Sequence[Span]]]
) -> bool:
    """Whether a figure of the category means anything: a library's own buffers, which nobody lists or marks, look like
    activations and the rest."""
    if category == "activations":
        return bool(timeline.marked(f"{MARK_PREFIX}forward"))
    if category == "communication_buffers":
        is_listed = any(category in of_step for of_step in listed)
        return is_listed or bool(timeline.marked(f"{MARK_PREFIX}lending.{category}"))
    return True


def _born_in_marks(timeline: Timeline, addresses: _Addresses) -> Iterator[tuple[Block, Category]]:
    """What marks alone tell of a block; the first one counts."""
    for lent in MEMORY_CATEGORIES:
        for mark in timeline.marked(f"{MARK_PREFIX}lending.{lent}"):
            yield from ((b, lent) for b in addresses.born_in(mark))
    for phase, product in _PHASE_PRODUCTS.items():
        for step in timeline.marked(STEP_MARK):
            for mark in phase_marks(timeline, phase, step):
                yield from ((b, product) for b in addresses.born_in(mark) if mark.end < b.died <= step.end)


class _Addresses:
    """Finds blocks of a timeline by time and address."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._by_birth = blocks
        self._births = [block.born for block in blocks]
        self._alive: dict[int, list[Block]] = {}  # moment -> living blocks by address

    def find(self, address: int, moment: int) -> Block | None:
        """The block alive at `moment` that `address` lies in."""
        if moment not in self._alive:
            living = (block for block in self._by_birth if block.born <= moment < block.died)
            self._alive[moment] = sorted(living, key=lambda block: block.address)
        alive = self._alive[moment]
        index = bisect_right(alive, address, key=lambda block: block.address) - 1
        if index >= 0 and address < alive[index].address + alive[index].num_bytes:
            return alive[index]
        return None

    def born_in(self, mark: Mark) -> Sequence[Block]:
        return self._by_birth[bisect_right(self._births, mark.begin) : bisect_right(self._births, mark.end)]


def _bytes_once(spans: Iterable[tuple[int, int, Category]]) -> dict[Category, int]:
    """Bytes by category of (first address, end, category) spans that may overlap: each address counts for the category
    that comes first in the order of CATEGORIES."""
    count: dict[Category, int] = {}
    edges: list[tuple[int, int, Category]] = []
    for begin, end, category in spans:
        edges += [(begin, 1, category), (end, -1, category)]
    open_spans = dict.fromkeys(CATEGORIES, 0)
    previous = 0
    for address, change, category in sorted(edges):
        owner = next((c for c in CATEGORIES if open_spans[c]), None)
        if owner:
            count[owner] = count.get(owner, 0) + address - previous
        open_spans[category] += change
        previous = address
    return count
