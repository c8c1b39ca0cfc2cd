"""Awkward counts: of valid tokens, of samples, of micro-batches. What the loss is divided by, and who has how much."""

from __future__ import annotations

import torch

from harness.models.awkward.samples import NUM_SAMPLES
from harness.models.awkward.small_gpt import LENGTH, small_gpt
from harness.workload import Training, Workload


def unequal_tokens() -> Workload:
    """Valid tokens differ widely between ranks and micro-batches: only the global count divides the loss rightly."""
    pattern = torch.tensor([1, 8, 2, 7, 8, 1, 1, 3, 8, 8, 1, 5])
    num_valid = pattern.repeat(NUM_SAMPLES)[:NUM_SAMPLES]
    training = Training(global_batch_size=8, num_micro_batches=2, optimizer="sgd", learning_rate=0.1)
    return small_gpt(training, num_valid=num_valid)


def uneven_samples() -> Workload:
    """Five samples in two micro-batches: ranks get unlike numbers of samples, and at three ranks some get none."""
    training = Training(global_batch_size=5, num_micro_batches=2, optimizer="sgd", learning_rate=0.1)
    return small_gpt(training)


def padding_micro_batch() -> Workload:
    """One whole micro-batch of each step is padding: it adds nothing, and no mean over zero tokens is ever taken."""
    micro_batch = torch.arange(NUM_SAMPLES) // 4
    # The second micro-batch of even steps, the first of odd ones.
    padded = (micro_batch % 4 == 1) | (micro_batch % 4 == 2)
    training = Training(global_batch_size=8, num_micro_batches=2, clip_norm=0.5)
    return small_gpt(training, num_valid=torch.where(padded, 0, LENGTH))


def few_micro_batches() -> Workload:
    """One micro-batch and six blocks: fewer micro-batches than a pipeline has stages."""
    return small_gpt(Training(global_batch_size=4, num_micro_batches=1), num_layers=4)


def vocabulary() -> Workload:
    """A vocabulary of 51 tokens: divisible by no even tensor degree."""
    return small_gpt(Training(global_batch_size=8, num_micro_batches=2, clip_norm=0.5), vocabulary_size=51)
