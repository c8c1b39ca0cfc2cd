"""Chains of blocks that torch's zero-bubble schedules cannot train, and one whose shapes torch's stages cannot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from harness.datasets import Tensors
from harness.workload import Training, Workload, children_of_sequential

WIDTH = 6


class Shifted(nn.Module):
    """A layer and a sum of all that comes out with one shift, or two whose gradients are the same."""

    def __init__(self, num_shifts: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.shifts = nn.ParameterList(torch.randn(2, WIDTH) for _ in range(num_shifts))

    def forward(self, x: Tensor) -> Tensor:  # (2, WIDTH), in and out
        x = torch.tanh(self.layer(x))
        for shift in self.shifts:
            x = x + shift
        return x


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t()


def one_shift() -> Workload:
    return _workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Shifted(1), nn.Linear(WIDTH, WIDTH)))


def two_shifts() -> Workload:
    return _workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Shifted(2), nn.Linear(WIDTH, WIDTH)))


def transposing() -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Transposed(), Transposed(), nn.Linear(WIDTH, WIDTH))

    return _workload(model)


def _workload(model: Callable[[], nn.Module]) -> Workload:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = (torch.randn((64, WIDTH), generator=generator) for _ in range(2))
    return Workload(
        name="chains",
        model=model,
        dataset=Tensors(inputs, targets),
        loss=lambda outputs, wanted: (outputs - wanted).square().sum(),
        training=Training(global_batch_size=8, learning_rate=1e-2, num_micro_batches=4, clip_norm=1.0),
        unit="samples",
        chain=children_of_sequential,
    )
