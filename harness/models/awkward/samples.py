"""The small made-up data of the awkward workloads, laid out by position: a kind says what stands in which step,
micro-batch and rank, and that is where it is met."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.data import IGNORE_INDEX, shuffled_index
from harness.datasets import Tensors

NUM_SAMPLES = 64
"""Positions in an epoch: the first eight steps of a global batch of eight."""


def arranged(inputs: Tensor, targets: Tensor) -> Tensors:
    """A dataset whose first epoch at seed 0 visits these rows in this very order: it undoes the workload's shuffle."""
    visited = torch.tensor([shuffled_index(position, len(inputs), seed=0) for position in range(len(inputs))])
    position_of = visited.argsort()
    return Tensors(inputs[position_of], targets[position_of])


def token_samples(vocabulary_size: int, length: int, num_valid: Tensor | None = None) -> Tensors:
    """Random tokens and targets (NUM_SAMPLES, length). At position p all targets after the first `num_valid[p]` are
    ignored; without it none is."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary_size, (2, NUM_SAMPLES, length), generator=generator)
    inputs, targets = tokens.unbind()
    if num_valid is not None:
        ignored = torch.arange(length) >= num_valid.unsqueeze(1)  # (NUM_SAMPLES, length)
        targets = targets.masked_fill(ignored, IGNORE_INDEX)
    return arranged(inputs, targets)


def feature_samples(num_inputs: int, num_outputs: int, flagged: Tensor | None = None) -> Tensors:
    """Random features and targets for a regression. With `flagged` (NUM_SAMPLES,) the first feature is 1 where it is
    true and -1 elsewhere: a mark for layers that only some samples go through."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(NUM_SAMPLES, num_inputs, generator=generator)
    targets = torch.randn(NUM_SAMPLES, num_outputs, generator=generator)
    if flagged is not None:
        inputs[:, 0] = torch.where(flagged, 1.0, -1.0)
    return arranged(inputs, targets)


def image_samples(shape: tuple[int, int, int], num_classes: int) -> Tensors:
    """Random images (NUM_SAMPLES, *shape) with random classes."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(NUM_SAMPLES, *shape, generator=generator)
    return arranged(images, torch.randint(num_classes, (NUM_SAMPLES,), generator=generator))


def flags(positions_by_step: tuple[tuple[int, ...], ...], global_batch_size: int) -> Tensor:
    """True (NUM_SAMPLES,) at the given positions of each step; the list of steps starts over at its end."""
    result = torch.zeros(NUM_SAMPLES, dtype=torch.bool)
    for position in range(NUM_SAMPLES):
        step, place = divmod(position, global_batch_size)
        result[position] = place in positions_by_step[step % len(positions_by_step)]
    return result


def squared_error_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of the regressions: a sum over samples and dims; a scalar."""
    return (outputs - targets).square().sum()
