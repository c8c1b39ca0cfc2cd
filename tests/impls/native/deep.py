"""A stack of equal blocks, as deep as a test asks for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from harness.datasets import Tensors
from harness.workload import Training, Workload

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.second = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (samples, WIDTH), in and out
        return x + torch.tanh(self.second(torch.tanh(self.first(x))))


def stack(depth: int = 4) -> Workload:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, WIDTH, generator=generator)
    return Workload(
        name="stack",
        model=lambda: nn.Sequential(*(Block() for _ in range(depth))),
        dataset=Tensors(inputs, inputs.roll(1, 0)),
        loss=lambda outputs, targets: (outputs - targets).square().sum(),
        training=Training(global_batch_size=4, learning_rate=1e-2),
        unit="samples",
    )


class Headed(nn.Module):
    """Blocks between layers that belong to none: stage 3 keeps these for the whole micro-batch."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def headed(depth: int = 8) -> Workload:
    return replace(stack(depth), model=lambda: Headed(depth), blocks=lambda model: list(model.blocks))
