"""Legal models that break an implementation which assumes too much of them: `odd_models.py:cached` and so on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.datasets import Tensors
from harness.workload import Training, Workload


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)


class CachesATensor(_Model):
    """Keeps what its first forward computes, as rotary embeddings and masks do."""

    cache: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(6, dtype=inputs.dtype, device=inputs.device) / 6
        hidden: Tensor = self.last(torch.tanh(self.first(inputs) + self.cache) + self.second(inputs))
        return hidden


class CountsForwards(_Model):
    """Every forward weighs more than the one before."""

    num_forwards = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_forwards += 1
        hidden: Tensor = self.last(torch.tanh(self.first(inputs)) + self.num_forwards * self.second(inputs))
        return hidden


class OrderDependsOnShape(_Model):
    """Ranks with unlike numbers of samples use the layers in unlike orders."""

    def forward(self, inputs: Tensor) -> Tensor:
        layers = (self.first, self.second) if len(inputs) % 2 else (self.second, self.first)
        outputs = [torch.tanh(layer(inputs)) for layer in layers]
        hidden: Tensor = self.last(outputs[0] * outputs[1])
        return hidden


class DifferentiatesInForward(_Model):
    """Runs a backward pass of its own through layers that are being trained, and keeps none of it."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            probe = inputs.detach().requires_grad_()
            (saliency,) = torch.autograd.grad(torch.tanh(self.first(probe)).sum(), probe)
        hidden: Tensor = self.last(torch.tanh(self.first(inputs * saliency)) + self.second(inputs))
        return hidden


class DifferentiatesTwice(_Model):
    """Its output is itself a gradient, as forces are."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.enable_grad():  # also where it is evaluated
            probe = inputs.detach().requires_grad_()
            energy = self.last(torch.tanh(self.second(torch.tanh(self.first(probe))))).sum()
            (force,) = torch.autograd.grad(energy, probe, create_graph=True)
        return force[:, :3]


class Vectorised(_Model):
    """Sample by sample, under a function transform."""

    def forward(self, inputs: Tensor) -> Tensor:
        def one(sample: Tensor) -> Tensor:
            hidden: Tensor = self.last(torch.tanh(self.first(sample)) + self.second(sample))
            return hidden

        output: Tensor = torch.func.vmap(one)(inputs)
        return output


class HooksItsWeight(_Model):
    """A hook triples one weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: 3 * gradient)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.last(torch.tanh(self.first(inputs)) + self.second(inputs))
        return hidden


def _workload(model: type[nn.Module], **options: Any) -> Workload:
    generator = torch.Generator().manual_seed(7)
    inputs, targets = (torch.randn(20, width, generator=generator) for width in (6, 3))
    return Workload(
        name=model.__name__,
        model=model,
        dataset=Tensors(inputs, targets),
        training=Training(global_batch_size=5),
        loss=lambda outputs, expected: ((outputs - expected) ** 2).sum(),
        unit="samples",
        **options,
    )


def cached() -> Workload:
    return _workload(CachesATensor)


def counting() -> Workload:
    return _workload(CountsForwards)


def shape_ordered() -> Workload:
    return _workload(OrderDependsOnShape)


def saliency() -> Workload:
    return _workload(DifferentiatesInForward)


def force() -> Workload:
    return _workload(DifferentiatesTwice, leaves_parameters_unused=True)


def vectorised() -> Workload:
    return _workload(Vectorised)


def hooked() -> Workload:
    return _workload(HooksItsWeight)
