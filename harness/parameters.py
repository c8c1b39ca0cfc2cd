"""The registry of logical parameters, built before any strategy flattens or shards: the one source for decay groups,
ties, norms, memory formulas and expected bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class LogicalParameter:
    """One trainable or frozen tensor of the model, whole and unpadded, however a strategy stores it.

    `aliases` are its further names (tied weights); it is stored, stepped and counted once, under `name`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    decayed: bool
    aliases: tuple[str, ...] = ()

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def decay_matrices(name: str, parameter: torch.Tensor) -> bool:
    """The usual rule: matrices and larger decay; biases, norm gains and scalars do not."""
    return parameter.ndim >= 2


def logical_parameters(
    model: nn.Module, decays: Callable[[str, torch.Tensor], bool] = decay_matrices
) -> tuple[LogicalParameter, ...]:
    """Every parameter of `model` once, in order of registration."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return tuple(
        LogicalParameter(
            name=first,
            shape=tuple(tensors[key].shape),
            dtype=tensors[key].dtype,
            trainable=tensors[key].requires_grad,
            decayed=decays(first, tensors[key]),
            aliases=tuple(aliases),
        )
        for key, (first, *aliases) in names.items()
    )
