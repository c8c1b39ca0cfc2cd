"""Times of blocks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from harness.block_times import block_seconds
from harness.datasets import Tensors
from harness.workload import Workload, children_of_sequential

SLEEP_SECONDS = 0.01


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SLEEP_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(2 * SLEEP_SECONDS)
        return gradient


class Slow(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The second output carries no gradient."""
        asleep: Tensor = Sleep.apply(x)
        return asleep, x.detach()


class Join(nn.Module):
    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        return state[0] + state[1]


def test_forward_and_backward_of_each_block_are_timed_apart() -> None:
    workload = Workload(
        name="slow",
        model=lambda: nn.Sequential(nn.Linear(3, 3), Slow(), Join(), nn.Linear(3, 2)),
        dataset=Tensors(torch.zeros(16, 3), torch.zeros(16, 2)),
        loss=lambda outputs, targets: (outputs - targets).square().sum(),
        chain=children_of_sequential,
    )
    first, slow, join, last = block_seconds(workload, torch.device("cpu"))
    assert slow >= 3 * SLEEP_SECONDS
    assert max(first, join, last) < SLEEP_SECONDS
