"""torch.fsdp with its transport taken away, and workloads that show what FSDP2 can and cannot do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from harness.datasets import Tensors
from harness.implementation import StepOutput
from harness.models import awkward
from harness.workload import Batch, Training, Workload
from impls.torch.fsdp import TorchFullySharded

WIDTHS = (64, 256, 128, 512, 96, 320, 64)


class WithoutTransport(TorchFullySharded):
    """In an instrumented run: collectives complete at once and move nothing, so that memory is FSDP's own alone. (What
    gloo's threads free goes unseen, so that its copies seem to live on.)"""

    def __init__(self, workload: Workload, layout: Any, mesh: Any, device: torch.device, **options: Any) -> None:
        super().__init__(workload, layout, mesh, device, **options)
        mesh.observer.mode = "null"

    def train_step(self, batch: Batch) -> StepOutput:
        # oneDNN's matrix products in bf16 take scratch memory on some CPUs and none on others.
        with torch.backends.mkldnn.flags(enabled=False):
            return super().train_step(batch)


def chain(num_micro_batches: int = 1, clip_norm: float | None = None, num_frozen: int = 0) -> Workload:
    """Matrices of unlike sizes, whose bytes dwarf those of a sample; the first `num_frozen` of them frozen."""

    def model() -> nn.Module:
        layers = [nn.Linear(width, after, bias=False) for width, after in pairwise(WIDTHS)]
        for layer in layers[:num_frozen]:
            layer.requires_grad_(False)
        return nn.Sequential(*layers)

    return _regression(model, WIDTHS[0], num_micro_batches=num_micro_batches, clip_norm=clip_norm)


class Twice(nn.Module):
    """Calls its first block again after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.first):
            x = torch.tanh(layer(x))
        output: Tensor = self.last(x)
        return output


def twice() -> Workload:
    return _regression(Twice, blocks=lambda model: list(model.children()))


class LeavesABlockOut(nn.Module):
    """Its second block is for samples with a positive first feature, and called for nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.first(x)
        return torch.tanh(self.second(output)) if (x[:, 0] > 0).all() else output


def leaves_a_block_out() -> Workload:
    return _regression(
        LeavesABlockOut,
        blocks=lambda model: list(model.children()),
        leaves_parameters_unused=True,
        positive_first=False,
    )


class Holds(nn.Module):
    """Keeps its layer's weight where no module has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.held = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) @ self.held[0]
        return output


def holds() -> Workload:
    return _regression(Holds)


def undeclared() -> Workload:
    """Says nothing of the parameters that it leaves unused on some ranks."""
    return replace(awkward.workload("rank_dependent"), leaves_parameters_unused=False)


def with_parameter(make: Callable[[], nn.Parameter]) -> Workload:
    """A layer beside a parameter called `extra`."""

    def model() -> nn.Module:
        layer = nn.Linear(6, 6)
        layer.register_parameter("extra", make())
        return nn.Sequential(layer)

    return _regression(model)


def with_hook() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(6))
    parameter.register_hook(lambda gradient: 3 * gradient)
    return parameter


def with_layers(*layers: nn.Module, **options: Any) -> Workload:
    return _regression(lambda: nn.Sequential(*layers), **options)


def _regression(
    model: Callable[[], nn.Module],
    width: int = 6,
    *,
    num_micro_batches: int = 2,
    clip_norm: float | None = None,
    blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    positive_first: bool = True,
    **options: Any,
) -> Workload:
    generator = torch.Generator().manual_seed(7)
    inputs, targets = (torch.randn(24, width, generator=generator) for _ in range(2))
    if not positive_first:
        inputs[:, 0] = -1.0
    return Workload(
        name="fsdp",
        model=model,
        dataset=Tensors(inputs, targets),
        training=Training(global_batch_size=8, num_micro_batches=num_micro_batches, clip_norm=clip_norm),
        loss=lambda outputs, expected: ((outputs - expected) ** 2).sum(),
        unit="samples",
        **({"blocks": blocks} if blocks else {}),
        **options,
    )
