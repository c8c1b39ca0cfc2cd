"""A small convolutional network with BatchNorm on scikit-learn's bundled digits, as a chain of blocks.

BatchNorm makes a sample's result depend on its neighbours: `local` takes the statistics of each rank's own
micro-batch, `synchronised` those of the whole micro-batch over all data ranks (Ioffe and Szegedy 2015).
"""

from __future__ import annotations

from torch import nn

from harness.datasets import digits
from harness.models._options import check_choice, check_positive_integers
from harness.workload import Training, Workload

NUM_CLASSES = 10
IMAGE_SIZE = 8
BATCH_NORMS = ("local", "synchronised")


def network(width: int) -> nn.Sequential:
    """Images (samples, 1, 8, 8) to logits (samples, 10)."""
    return nn.Sequential(
        convolution(1, width),
        nn.Sequential(convolution(width, 2 * width), nn.AvgPool2d(2)),
        nn.Sequential(convolution(2 * width, 4 * width), nn.AvgPool2d(2)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, NUM_CLASSES)),
    )


def convolution(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """3 x 3 convolution, BatchNorm, ReLU at the size of the image."""
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(),
    )


def flops_per_sample(width: int) -> float:
    """Forward and backward: 6 for each weight at each position of its output."""
    pixels = IMAGE_SIZE**2
    convolutions = 9 * width * pixels + 9 * 2 * width**2 * pixels + 9 * 8 * width**2 * pixels / 4
    return 6.0 * (convolutions + 4 * width * NUM_CLASSES)


DEFAULT_TRAINING = Training(global_batch_size=32, optimizer="sgd", learning_rate=0.05, weight_decay=5e-4)


def workload(training: Training = DEFAULT_TRAINING, *, width: int = 16, batch_norm: str = "local") -> Workload:
    """Classification of digits; `batch_norm` is `local` or `synchronised`. ValueError for anything else."""
    check_positive_integers(width=width)
    check_choice("batch_norm", batch_norm, BATCH_NORMS)
    return Workload(
        name="convnet",
        model=lambda: network(width),
        dataset=digits(),
        training=training,
        unit="samples",
        depends_on_chunks=batch_norm == "local",
        synchronise_batch_norm=batch_norm == "synchronised",
        flops_per_unit=flops_per_sample(width),
    )
