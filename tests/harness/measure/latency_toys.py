"""Implementations that train nothing and wait for the link in one way each."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.implementation import Implementation, StepOutput
from harness.layout import Layout
from harness.mesh import Mesh
from harness.workload import Batch, Workload


class Toy(Implementation):
    strategy = "toy"

    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        self.module = nn.Linear(1, 1)
        self.group = mesh.group("world")
        self.observer = mesh.observer
        self.left_over: dist.Work | None = None

    @abstractmethod
    def exchange(self) -> None:
        """What a step consists of."""

    def train_step(self, batch: Batch) -> StepOutput:
        self.exchange()
        return StepOutput(
            loss_sum=torch.zeros(()), num_tokens=1, gradient_norm=None, skipped=False, learning_rates=(0.0,)
        )

    def start(self) -> dist.Work:
        work = dist.all_reduce(torch.ones(1), group=self.group, async_op=True)
        assert work is not None
        return work

    def full_gradients(self) -> dict[str, Tensor]:
        return {}

    def full_parameters(self) -> dict[str, Tensor]:
        return {}


class ThreeInTurn(Toy):
    """Each all-reduce is waited for before the next begins."""

    def exchange(self) -> None:
        for _ in range(3):
            self.start().wait()


class FiveAtOnce(Toy):
    def exchange(self) -> None:
        for work in [self.start() for _ in range(5)]:
            work.wait()


class AcrossSteps(Toy):
    """Waits in each step for what it has left in flight in the one before."""

    def exchange(self) -> None:
        if self.left_over is not None:
            self.left_over.wait()
        self.left_over = self.start()


class PastTheBackend(Toy):
    """A transport of its own that never asks whether anything has arrived."""

    def exchange(self) -> None:
        self.start().wait()
        if self.observer is not None and not self.observer.null:
            self.observer.completed(self.observer.launched("all_reduce", (0, 1), torch.ones(1), 4, "telepathy"))
