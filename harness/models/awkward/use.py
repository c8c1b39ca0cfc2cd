"""Awkward use: parameters that nobody uses, that some ranks use, or that are used several times."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from harness.models.awkward.samples import feature_samples, flags, squared_error_sum
from harness.models.awkward.weights import STRONG_DECAY
from harness.workload import Training, Workload

WIDTH = 6
GLOBAL_BATCH_SIZE = 8


class Unused(nn.Module):
    """A layer in use beside one that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (samples, WIDTH), in and out
        return torch.tanh(self.used(x))


class Reused(nn.Module):
    """One layer, applied twice to every sample and a third time to those whose first feature is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (samples, WIDTH), in and out
        again = x[:, :1] > 0
        x = torch.tanh(self.layer(torch.tanh(self.layer(x))))
        return torch.where(again, torch.tanh(self.layer(x)), x) if again.any() else x


class Branch(nn.Module):
    """A residual branch for samples whose first feature is positive; not called where a micro-batch has none."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (samples, WIDTH), in and out
        taken = x[:, :1] > 0
        return torch.where(taken, x + torch.tanh(self.branch(x)), x) if taken.any() else x


def unused() -> Workload:
    """A parameter that nobody ever uses: its gradient stays None, so no decay, no momentum, no change."""
    return _regression(Unused, unused=True)


def reused() -> Workload:
    """One layer called two or three times in a forward, as the batch has it: its gradient is ready once, complete."""
    return _regression(Reused, ((0, 1), (7,), (), (2, 5)))


def rank_dependent() -> Workload:
    """A branch for one or two samples of each step: most ranks and micro-batches have no gradient for it, some have."""
    return _regression(Branch, ((0,), (7,), (1, 6), (3, 4)), unused=True)


def sometimes_unused() -> Workload:
    """A branch in use at step 0, unused everywhere at step 1, used again after: one step without decay or momentum."""
    return _regression(Branch, ((0, 6), (), (5,), (2,)), unused=True)


def _regression(
    first: Callable[[], nn.Module], flagged: tuple[tuple[int, ...], ...] | None = None, *, unused: bool = False
) -> Workload:
    """`first`, then two plain layers; `flagged`, by step, are the places of samples with a positive first feature;
    `unused` says that some rank's step leaves a parameter out."""
    flagged_samples = flags(flagged, GLOBAL_BATCH_SIZE) if flagged is not None else None
    return Workload(
        name="awkward",
        model=lambda: nn.Sequential(first(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)),
        dataset=feature_samples(WIDTH, 3, flagged_samples),
        training=Training(
            global_batch_size=GLOBAL_BATCH_SIZE, num_micro_batches=2, weight_decay=STRONG_DECAY, clip_norm=0.5
        ),
        loss=squared_error_sum,
        unit="samples",
        leaves_parameters_unused=unused,
    )
