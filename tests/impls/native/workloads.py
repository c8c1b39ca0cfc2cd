"""Workloads that the tests of our own implementations train, beside the awkward ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.models import gpt
from harness.models.awkward.samples import arranged, feature_samples, squared_error_sum, token_samples
from harness.tensor_plan import under
from harness.workload import Training, Workload

NUM_MICRO_BATCHES = 256


def sum_of_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum()


def drops() -> Workload:
    """One weight, 512 samples a step in 256 micro-batches of two alike, each with a gradient of 1 to 1.5 over 512 that
    bf16 holds; so it does their sum in one process. Halfway through a sum of all they are less than half its spacing.
    """
    inputs = 1 + (torch.arange(2 * NUM_MICRO_BATCHES) // 2 % 65).unsqueeze(1) / 128
    return Workload(
        name="drops",
        model=lambda: nn.Linear(1, 1, bias=False),
        dataset=arranged(inputs, torch.zeros(len(inputs), 1)),
        training=Training(global_batch_size=2 * NUM_MICRO_BATCHES, num_micro_batches=NUM_MICRO_BATCHES),
        loss=sum_of_outputs,
        unit="samples",
    )


class OutOfOrder(nn.Module):
    """Registered first, used last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.middle = nn.Linear(6, 6)
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return output


def out_of_order() -> Workload:
    return _regression(OutOfOrder)


class Sparse(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3, sparse=True)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + self.embedding((x[:, 0] > 0).long())
        return output


def sparse() -> Workload:
    return _regression(Sparse)


class Reassigned(nn.Module):
    """Puts new tensors in the place of its buffers, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().abs().sum()
        self.table = (self.table.t() + x.detach().sum()).t()
        output: Tensor = self.layer(x) * self.mask
        return output


def reassigned() -> Workload:
    return _regression(Reassigned)


def clipped_and_skipping() -> Workload:
    """Every step is clipped; step 1 has a gradient that is not finite, on the last rank."""
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(4))
    inputs[15, 0] = torch.inf
    return _regression(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        inputs=inputs,
        clip_norm=0.01,
        skip_nonfinite=True,
    )


def _regression(model: object, *, inputs: Tensor | None = None, **training: object) -> Workload:
    dataset = feature_samples(6, 3)
    if inputs is not None:
        dataset = arranged(inputs, torch.randn(len(inputs), 3, generator=torch.Generator().manual_seed(5)))
    return Workload(
        name="regression",
        model=model,  # type: ignore[arg-type]
        dataset=dataset,
        training=Training(global_batch_size=8, num_micro_batches=2, **training),  # type: ignore[arg-type]
        loss=squared_error_sum,
        unit="samples",
    )


class Probabilities(nn.Module):
    """A decoder whose forward ends across its vocabulary."""

    def __init__(self, shape: gpt.Shape) -> None:
        super().__init__()
        self.decoder = gpt.decoder(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        probabilities: Tensor = self.decoder(tokens).softmax(-1)
        return probabilities


def probabilities() -> Workload:
    """The plain loss over what is no longer the logits of the model's vocabulary-parallel head."""
    shape = gpt.Shape(num_layers=1, width=16, num_heads=2, vocabulary_size=32, sequence_length=8)
    return Workload(
        name="probabilities",
        model=lambda: Probabilities(shape),
        dataset=token_samples(32, 8),
        tensor_plan=lambda model: under("decoder", gpt.tensor_plan(shape)),
        blocks=lambda model: [module for name, module in model.decoder.named_children() if name.startswith("block")],
        training=Training(global_batch_size=4),
    )
