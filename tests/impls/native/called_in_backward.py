"""Workloads whose blocks are called again in backward, several at a time, and one with parameters of whole numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.datasets import Tensors
from harness.workload import Training, Workload

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.second(torch.tanh(self.first(x)))
        return output


class Permuting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, self.order]


class InSegments(nn.Module):
    """Checkpoints `size` blocks at a time."""

    def __init__(self, size: int, *, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.size, self.reentrant = size, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for begin in range(0, len(self.blocks), self.size):
            segment = self.blocks[begin : begin + self.size]
            x = checkpoint(nn.Sequential(*segment), x, use_reentrant=self.reentrant)
        output: Tensor = self.head(x)
        return output


class OneLayerInAllSegments(nn.Module):
    """One layer belongs to the model, and every re-entrant checkpoint uses it: each is a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.stem = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.stem(torch.tanh(self.shared(x))))
        for block in self.blocks:
            x = checkpoint(lambda x, b=block: x + torch.tanh(b(x)) + torch.tanh(self.shared(x)), x, use_reentrant=True)
        return x


class Reordered(nn.Module):
    """Looked at, it calls its blocks in turn; when it trains, in the order given, be it one of them twice."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.order = [int(index) for index in order.split("-")]

    def forward(self, x: Tensor) -> Tensor:
        for index in range(len(self.blocks)) if x.is_meta else self.order:
            x = self.blocks[index](x)
        return x


def reordered(order: str, num_out: int = 0) -> Workload:
    """`num_out` blocks are none that the workload names: the first ones."""
    return _workload(lambda: Reordered(order), lambda model: list(model.blocks)[num_out:])


def pairs() -> Workload:
    return _workload(lambda: InSegments(2, reentrant=False), lambda model: list(model.blocks))


def triples() -> Workload:
    return _workload(lambda: InSegments(3, reentrant=False), lambda model: list(model.blocks))


def reentrant_pairs() -> Workload:
    return _workload(lambda: InSegments(2, reentrant=True), lambda model: list(model.blocks))


def reentrant() -> Workload:
    return _workload(lambda: InSegments(1, reentrant=True), lambda model: list(model.blocks))


def one_layer() -> Workload:
    return _workload(OneLayerInAllSegments, lambda model: list(model.blocks))


def whole_numbers() -> Workload:
    return _workload(lambda: nn.Sequential(*(Permuting() for _ in range(3))), lambda model: list(model.children()))


def _workload(model: Callable[[], nn.Module], blocks: Callable) -> Workload:
    generator = torch.Generator().manual_seed(7)
    inputs, targets = (torch.randn(64, WIDTH, generator=generator) for _ in range(2))
    return Workload(
        name="called_in_backward",
        model=model,
        dataset=Tensors(inputs, targets),
        loss=lambda outputs, wanted: (outputs - wanted).square().sum(),
        training=Training(global_batch_size=8, learning_rate=1e-2),
        unit="samples",
        blocks=blocks,
    )
