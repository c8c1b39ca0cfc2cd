"""Datasets: where samples come from. A sample is addressed by its index; the order is the workload's business."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Dataset(Protocol):
    """A fixed collection of samples. `fingerprint` changes whenever a sample does."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """(input, target) of one sample, without a batch dim. Ignored targets hold IGNORE_INDEX."""
        ...


IGNORE_INDEX = -100


def shuffled_index(position: int, length: int, seed: int) -> int:
    """The sample that stands at `position` of the endless stream: each epoch visits all `length` samples once, in an
    order that depends on (seed, epoch) alone, so it is the same at every data degree and after a resume."""
    epoch, offset = divmod(position, length)
    return int(_permutation(length, seed, epoch)[offset])


_permutations: dict[tuple[int, int, int], Tensor] = {}


def _permutation(length: int, seed: int, epoch: int) -> Tensor:
    key = (length, seed, epoch)
    if key not in _permutations:
        if len(_permutations) > 3:
            _permutations.clear()
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        _permutations[key] = torch.randperm(length, generator=generator)
    return _permutations[key]
