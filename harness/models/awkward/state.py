"""Awkward state: buffers that a forward changes, statistics over a batch, random numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.models import convnet
from harness.models.awkward.samples import feature_samples, image_samples, squared_error_sum
from harness.models.awkward.small_gpt import small_gpt
from harness.models.awkward.weights import disturb_vectors
from harness.workload import Training, Workload


def batch_norm() -> Workload:
    """BatchNorm on each rank's own micro-batch, five samples over the ranks: unlike counts, statistics kept apart."""
    return _convnet(synchronised=False)


def synchronised_batch_norm() -> Workload:
    """BatchNorm over the five samples of all ranks: statistics and gradients weighted by each rank's count."""
    return _convnet(synchronised=True)


def _convnet(*, synchronised: bool) -> Workload:
    def model() -> nn.Module:
        network = convnet.network(width=3)
        disturb_vectors(network)
        return network

    return Workload(
        name="awkward",
        model=model,
        dataset=image_samples((1, convnet.IMAGE_SIZE, convnet.IMAGE_SIZE), convnet.NUM_CLASSES),
        training=Training(global_batch_size=10, num_micro_batches=2, optimizer="sgd", learning_rate=0.05),
        unit="samples",
        depends_on_chunks=not synchronised,
        synchronise_batch_norm=synchronised,
    )


def dropout() -> Workload:
    """Dropout: masks follow from the micro-batch's seed, unlike on each rank, the same again when recomputed."""
    return small_gpt(Training(global_batch_size=8, num_micro_batches=2), dropout=0.2)


class Counting(nn.Module):
    """Counts its calls, and fades a gain with each of them: an integer, a float and an unsaved buffer."""

    num_calls: Tensor
    gain: Tensor
    offset: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("gain", torch.ones(width))
        self.register_buffer("offset", torch.full((width,), 0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
            self.gain *= 0.9
        # A copy: backward needs the gain of its own forward, whatever other micro-batches did to the buffer since.
        return x * (1.0 + self.gain.clone()) + self.offset


def buffers() -> Workload:
    """Integer and float buffers that each forward updates: once a micro-batch, dtypes kept, alike on all ranks."""
    return Workload(
        name="awkward",
        model=lambda: nn.Sequential(nn.Linear(6, 8), Counting(8), nn.Tanh(), nn.Linear(8, 3)),
        dataset=feature_samples(6, 3),
        training=Training(global_batch_size=8, num_micro_batches=2),
        loss=squared_error_sum,
        unit="samples",
    )
