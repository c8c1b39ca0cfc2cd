"""Chains of blocks for pipelines: masks and several tensors at the borders, a stage that trains nothing, sizes that
change from one micro-batch to the next, blocks that compute alike, and one that is no chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from harness.datasets import Tensors
from harness.workload import Batch, Training, Workload, children_of_sequential

WIDTH = 6


class Stem(nn.Module):
    """Hands on activations, a mask of whole numbers and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.first(x)), (x > 0).long(), x[:, :1].detach() * 0.5


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, shift = state
        return x + torch.tanh(self.inner(x)) * mask + shift, mask, shift


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, mask, shift = state
        output: Tensor = self.last(x * mask) - shift
        return output


class Activations(nn.Module):
    """Trains nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Noting(nn.Module):
    """Hands on more in training than in evaluation, as a router does that wants to be balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = torch.tanh(self.layer(x))
        return (y, y.square().mean(1)) if self.training else y


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        x, note = given if isinstance(given, tuple) else (given, given.new_zeros(len(given)))
        output: Tensor = self.layer(x) + note.unsqueeze(1)
        return output


class Shift(nn.Module):
    """Before the first product of a chain, so that backward has the gradient of its input to compute, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Remembering(nn.Module):
    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.memory = nn.Linear(WIDTH, WIDTH), memory

    def forward(self, x: Tensor) -> Tensor:
        self.memory[:] = [self.layer(x)]
        return torch.tanh(self.memory[0])


class Recalling(Remembering):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + self.memory[0]
        return output


@dataclass(frozen=True, kw_only=True)
class Uneven(Workload):
    """Sequences of which each micro-batch has others' length."""

    def batch(self, step: int, *, data_rank: int = 0, data_degree: int = 1) -> Batch:
        whole = super().batch(step, data_rank=data_rank, data_degree=data_degree)
        lengths = [3 + (step + 2 * index) % 4 for index in range(len(whole.micro_batches))]
        cut = (
            replace(micro_batch, inputs=micro_batch.inputs[:, :length], targets=micro_batch.targets[:, :length])
            for micro_batch, length in zip(whole.micro_batches, lengths, strict=True)
        )
        return replace(whole, micro_batches=tuple(cut))


def several_tensors(num_micro_batches: int = 3) -> Workload:
    return _workload(lambda: nn.Sequential(Stem(), Middle(), Middle(), End()), num_micro_batches)


def more_in_training(num_micro_batches: int = 2) -> Workload:
    return _workload(lambda: nn.Sequential(Noting(), Noted()), num_micro_batches)


def empty_stage(num_micro_batches: int = 2) -> Workload:
    return _workload(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Activations(), nn.Linear(WIDTH, WIDTH)), num_micro_batches
    )


def frozen_start(num_micro_batches: int = 2) -> Workload:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        return made.requires_grad_(False).append(nn.Linear(WIDTH, WIDTH))

    return _workload(model, num_micro_batches)


def changing_lengths(num_micro_batches: int = 4) -> Workload:
    made = _workload(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), num_micro_batches, length=8
    )
    return Uneven(**{name: getattr(made, name) for name in made.__dataclass_fields__})


def statistics(num_micro_batches: int = 2) -> Workload:
    """Buffers that each stage writes for itself."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH))

    made = _workload(lambda: nn.Sequential(block(), nn.Tanh(), block(), nn.Linear(WIDTH, WIDTH)), num_micro_batches)
    return replace(made, depends_on_chunks=True)


def even(num_micro_batches: int = 8, num_blocks: int = 8, width: int = 512, length: int = 128) -> Workload:
    """Nothing but products, of which backward has two and forward one; their gradients are large enough to be put off.
    Two sequences in each micro-batch."""

    def model() -> nn.Module:
        first, *others = (nn.Linear(width, width, bias=False) for _ in range(num_blocks))
        return nn.Sequential(nn.Sequential(Shift(width), first), *others)

    made = _workload(model, num_micro_batches, length=length, width=width)
    return replace(made, training=replace(made.training, global_batch_size=2 * num_micro_batches))


def skipping() -> Workload:
    def model() -> nn.Module:
        memory: list[Tensor] = []
        return nn.Sequential(Remembering(memory), nn.Tanh(), Recalling(memory))

    return _workload(model, 2)


def crossing_ties() -> Workload:
    """Two weights, each used by two blocks with one between: cut, different stages hold each of them."""

    def model() -> nn.Module:
        blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        blocks[2].weight, blocks[3].weight = blocks[0].weight, blocks[1].weight
        return nn.Sequential(*blocks)

    return _workload(model, 3)


def _workload(
    model: Callable[[], nn.Module], num_micro_batches: int, *, length: int | None = None, width: int = WIDTH
) -> Workload:
    generator = torch.Generator().manual_seed(3)
    shape = (64, width) if length is None else (64, length, width)
    inputs, targets = (torch.randn(shape, generator=generator) for _ in range(2))
    return Workload(
        name="chains",
        model=model,
        dataset=Tensors(inputs, targets),
        loss=lambda outputs, wanted: (outputs - wanted).square().sum(),
        training=Training(global_batch_size=8, learning_rate=1e-2, num_micro_batches=num_micro_batches, clip_norm=1.0),
        unit="samples",
        chain=children_of_sequential,
    )
