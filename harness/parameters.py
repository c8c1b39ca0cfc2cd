"""The registry of logical parameters, built before any strategy flattens or shards: the one source for decay groups,
ties, norms, memory formulas and expected bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from harness.precision import Precision

MemoryCategory = Literal["parameters", "gradients", "optimizer_states", "communication_buffers"]
MEMORY_CATEGORIES: tuple[MemoryCategory, ...] = get_args(MemoryCategory)


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


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether the model does something with the parameter's gradient as it is made."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def replicated_state_bytes(
    parameters: Sequence[LogicalParameter], precision: Precision, num_moments: int
) -> dict[MemoryCategory, int]:
    """Bytes of parameters, gradients and optimizer states where every rank holds all of them: for P parameters in fp32
    under AdamW 4P + 4P + 8P; in bf16 with fp32 masters 2P + 2P + 12P (Rajbhandari et al. 2020, "ZeRO")."""
    trained = [parameter for parameter in parameters if parameter.trainable]
    states = 0
    for parameter in trained:
        master = precision.master or parameter.dtype
        states += parameter.num_elements * master.itemsize * (num_moments + (precision.master is not None))
    gradients = sum(
        p.num_elements * (precision.gradient.itemsize if precision.master else p.dtype.itemsize) for p in trained
    )
    return {
        "parameters": sum(parameter.num_bytes for parameter in parameters),
        "gradients": gradients,
        "optimizer_states": states,
    }


def largest_of_each(of_ranks: Iterable[Mapping[MemoryCategory, int]]) -> dict[MemoryCategory, int]:
    """Of each category the most that any rank holds: as what is measured is told, whoever holds most of it."""
    largest: dict[MemoryCategory, int] = {}
    for states in of_ranks:
        for category, num_bytes in states.items():
            largest[category] = max(num_bytes, largest.get(category, 0))
    return largest


def all_reduce_wire_bytes(num_bytes: int, num_ranks: int) -> int:
    """What one rank of a ring sends to sum `num_bytes` over `num_ranks`: 2(n-1)/n of them, rounded up. An instrument
    that rounds each collective up counts less than a byte more for each."""
    return -(-2 * (num_ranks - 1) * num_bytes // num_ranks)


def broadcast_wire_bytes(num_bytes: int, num_ranks: int) -> int:
    """What the root sends to bring `num_bytes` to all ranks along gloo's binomial tree: `num_bytes` in each of its
    log2(n) rounds."""
    return (num_ranks - 1).bit_length() * num_bytes
