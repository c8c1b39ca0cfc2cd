"""Implementations that go wrong in one way each. They train nothing: a step is one all-reduce."""

from __future__ import annotations

import gc
import math
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import models
from harness.implementation import Implementation, StepOutput
from harness.layout import Layout
from harness.mesh import Mesh
from harness.workload import Batch, Workload
from impls.native.ddp import NativeDataParallel


class Sound(Implementation):
    """Nothing goes wrong."""

    strategy = "toy"

    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        self.rank = mesh.rank
        self.group = mesh.group("world")
        self.module = nn.Linear(1, 1)
        self.rate: Any = 0.0
        self.num_steps = 0

    def train_step(self, batch: Batch) -> StepOutput:
        dist.all_reduce(torch.ones(1), group=self.group)
        if self.rank == 1 and self.num_steps >= 1:
            self.go_wrong()
        elif self.num_steps >= 1:
            self.beside()
        self.num_steps += 1
        dist.all_reduce(torch.ones(1), group=self.group)
        loss = torch.zeros(())
        return StepOutput(loss_sum=loss, num_tokens=1, gradient_norm=None, skipped=False, learning_rates=(self.rate,))

    def go_wrong(self) -> None:
        """What rank 1 does in its second step and later ones, between two collectives."""

    def beside(self) -> None:
        """What the others do there."""

    def full_gradients(self) -> dict[str, Tensor]:
        return {}

    def full_parameters(self) -> dict[str, Tensor]:
        return {}


class Raises(Sound):
    def go_wrong(self) -> None:
        raise ValueError("the third bucket\nis empty")


class RaisesEndOfFile(Sound):
    def go_wrong(self) -> None:
        raise EOFError("ran out of input")


class TellsLate(Sound):
    """The others lose their connection and say so before the one that has raised does."""

    def go_wrong(self) -> None:
        time.sleep(2.0)
        raise ValueError("the third bucket is empty")

    def beside(self) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:12345")


class LeavesWithThree(Sound):
    def go_wrong(self) -> None:
        os._exit(3)


class LeavesWithZero(Sound):
    def go_wrong(self) -> None:
        print("last words")
        os._exit(0)


class Exits(Sound):
    def go_wrong(self) -> None:
        sys.exit(0)


class LeavesAChild(Sound):
    """Starts a process, then dies."""

    def go_wrong(self) -> None:
        subprocess.Popen(["sleep", "600"])
        os._exit(3)


class Slow(Sound):
    """Half a second a step, on every rank."""

    def go_wrong(self) -> None:
        time.sleep(0.5)


class Hangs(Sound):
    def go_wrong(self) -> None:
        while True:
            time.sleep(0.01)


class HangsInBackward(Sound):
    def go_wrong(self) -> None:
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(self.hook)
        (leaf * 2).sum().backward()

    def hook(self, gradient: Tensor) -> None:
        time.sleep(600)


class Mismatched(Sound):
    """Waits for a collective of its own, that nobody else takes part in."""

    def go_wrong(self) -> None:
        dist.recv(torch.ones(1), src=0, group=self.group)


class Stops(Sound):
    def go_wrong(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class BuildFails(Sound):
    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        super().__init__(workload, layout, mesh, device)
        if self.rank == 1:
            raise FileNotFoundError("shard-1.pt is missing")
        dist.barrier(group=self.group)


class OutgrowsItsLimit(Sound):
    def go_wrong(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
        torch.empty(2**36, dtype=torch.uint8).fill_(1)


class RunsOutOfMemory(Sound):
    def go_wrong(self) -> None:
        raise MemoryError


class Talks(Sound):
    """Megabytes on both streams."""

    def go_wrong(self) -> None:
        for _ in range(10):
            print("x" * 100_000)
            print("y" * 100_000, file=sys.stderr)


class Unpicklable(Sound):
    def go_wrong(self) -> None:
        self.rate = lambda: 0


class DiesInWarmUp(Sound):
    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        super().__init__(workload, layout, mesh, device)
        self.num_steps = 1

    def go_wrong(self) -> None:
        os._exit(3)


class NoLoss(Sound):
    """A loss that nobody holds."""

    def train_step(self, batch: Batch) -> StepOutput:
        super().train_step(batch)
        return StepOutput(loss_sum=None, num_tokens=0, gradient_norm=None, skipped=False, learning_rates=(0.0,))


class WarmsUp(Sound):
    """Keeps a clock of its own, on which the first three steps take five seconds and every other one takes one."""

    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        super().__init__(workload, layout, mesh, device)
        self.now = 0.0
        time.perf_counter = lambda: self.now

    def train_step(self, batch: Batch) -> StepOutput:
        self.now += 5.0 if self.num_steps < 3 else 1.0
        return super().train_step(batch)


class TimedOutside(Sound):
    """A fixed time a sample, however they are split; writes down on a clock of its own when its steps were."""

    def train_step(self, batch: Batch) -> StepOutput:
        began = time.monotonic()
        for micro_batch in batch.micro_batches:
            time.sleep(0.005 * len(micro_batch.inputs))
        output = super().train_step(batch)
        print("step", began, time.monotonic())
        return output


class TellsWhatIsFrozen(Sound):
    """How many objects its garbage collector leaves alone, and how many it walks."""

    def facts(self) -> dict[str, str]:
        return {"frozen": str(gc.get_freeze_count()), "walked": str(len(gc.get_objects()))}


class Unsupported(Sound):
    @classmethod
    def unsupported(cls, *arguments: Any) -> str | None:
        raise KeyError("tensor")


class NotFinite(Sound):
    """A step that takes no number of seconds."""

    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        super().__init__(workload, layout, mesh, device)
        time.process_time = lambda: math.inf


class OnceAsked(Sound):
    """Goes wrong in the first step after SIGUSR2; see tests/faults."""

    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        super().__init__(workload, layout, mesh, device)
        self.asked = False
        signal.signal(signal.SIGUSR2, self.ask)

    def ask(self, number: int, frame: object) -> None:
        self.asked = True

    def train_step(self, batch: Batch) -> StepOutput:
        print("step")
        time.sleep(0.03)
        return super().train_step(batch)


class Unhurried(NativeDataParallel):
    """Trains, but a step takes longer, and its log tells when it begins."""

    def train_step(self, batch: Batch) -> StepOutput:
        print("step")
        time.sleep(0.03)
        return super().train_step(batch)


class RaisesOnceAsked(OnceAsked):
    def go_wrong(self) -> None:
        if self.asked:
            raise ValueError("the third bucket is empty")


class HangsOnceAsked(OnceAsked):
    def go_wrong(self) -> None:
        while self.asked:
            time.sleep(0.01)


class OutgrowsItsLimitOnceAsked(OnceAsked):
    def go_wrong(self) -> None:
        if self.asked:
            resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
            torch.empty(2**36, dtype=torch.uint8).fill_(1)


class GrowsOnceAsked(OnceAsked):
    """By 32 MiB a time, up to 4 GiB."""

    def go_wrong(self) -> None:
        grown = []
        while self.asked and len(grown) < 128:
            grown.append(torch.ones(2**25, dtype=torch.uint8))


def _cannot_be_built() -> nn.Module:
    raise RuntimeError("no such layer")


def _takes_for_ever() -> nn.Module:
    time.sleep(600)
    return nn.Linear(1, 1)


def unbuildable() -> Workload:
    return replace(models.load("awkward:kind=unequal_tokens"), model=_cannot_be_built)


def endless() -> Workload:
    return replace(models.load("awkward:kind=unequal_tokens"), model=_takes_for_ever)
