"""Awkward recipes: optimizer, clipping, schedule, recomputation, steps that must be skipped."""

from __future__ import annotations

import torch
from torch import nn

from harness.models.awkward.samples import NUM_SAMPLES, arranged, squared_error_sum
from harness.models.awkward.small_gpt import small_gpt
from harness.workload import Training, Workload


def sgd() -> Workload:
    """SGD with momentum and decay: a gradient of the wrong scale shows, where Adam would hide it."""
    return small_gpt(Training(global_batch_size=8, num_micro_batches=2, optimizer="sgd", learning_rate=0.1))


def clipped() -> Workload:
    """SGD with the gradient clipped at every step: the norm must be that of the whole model, over all ranks."""
    return small_gpt(
        Training(global_batch_size=8, num_micro_batches=2, optimizer="sgd", learning_rate=0.5, clip_norm=0.05)
    )


def schedule() -> Workload:
    """Warm-up, then cosine, of a rate scaled with the global batch: counted in updates, not in micro-batches."""
    return small_gpt(
        Training(
            global_batch_size=8,
            num_micro_batches=2,
            optimizer="sgd",
            learning_rate=0.05,
            learning_rate_scaling="linear",
            base_global_batch_size=4,
            schedule="cosine",
            warmup_steps=2,
            total_steps=6,
        )
    )


def checkpointed() -> Workload:
    """Blocks recomputed in backward: hooks and gathers meet each block twice, gradients are bit for bit the same."""
    return small_gpt(Training(global_batch_size=8, num_micro_batches=2, activation_checkpointing=True))


def nonfinite() -> Workload:
    """One sample at step 1 has a finite loss and a gradient that is not: every rank must skip that step, or none."""
    generator = torch.Generator().manual_seed(4)
    inputs, targets = torch.randn(NUM_SAMPLES, 6, generator=generator), torch.randn(NUM_SAMPLES, 3, generator=generator)
    # tanh takes infinity to 1, and its derivative times the feature is 0 * inf. The last of step 1: on the last rank.
    inputs[15, 0] = torch.inf
    return Workload(
        name="awkward",
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        dataset=arranged(inputs, targets),
        training=Training(
            global_batch_size=8,
            num_micro_batches=2,
            skip_nonfinite=True,
            schedule="linear",
            warmup_steps=2,
            total_steps=10,
        ),
        loss=squared_error_sum,
        unit="samples",
    )
