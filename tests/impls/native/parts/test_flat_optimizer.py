"""The flat update held against torch's own optimizers on the separate parameters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from harness.parameters import LogicalParameter
from harness.workload import Training
from impls.native.parts.bucket_sums import Piece
from impls.native.parts.buckets import BucketPlan, plan_buckets
from impls.native.parts.flat_optimizer import FlatOptimizer

SHAPES = {"w1": (3, 5), "b1": (5,), "w2": (2, 7), "scale": ()}
RECIPE: dict[str, Any] = {"learning_rate": 0.01, "weight_decay": 0.5}


def plan(dtype: torch.dtype) -> BucketPlan:
    registry = [
        LogicalParameter(name=name, shape=shape, dtype=dtype, trainable=True, decayed=len(shape) == 2)
        for name, shape in SHAPES.items()
    ]
    return plan_buckets(registry, 1 << 20)[0]


def flat(bucket: BucketPlan, tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[segment.parameter.name].detach().flatten() for segment in bucket.segments])


def torch_optimizer(training: Training, parameters: dict[str, nn.Parameter]) -> Optimizer:
    groups = [
        {"params": [p], "weight_decay": training.weight_decay if p.ndim == 2 else 0.0} for p in parameters.values()
    ]
    if training.optimizer == "sgd":
        return SGD(groups, lr=training.learning_rate, momentum=training.momentum)
    return AdamW(
        groups, lr=training.learning_rate, betas=(training.beta1, training.beta2), eps=training.epsilon, foreach=False
    )


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("cuts", [[], [1], [4, 20, 21]], ids=str)
@pytest.mark.parametrize("unused_at", [{}, {1: {"w2", "b1"}, 3: {"scale"}}], ids=["used", "unused"])
def test_equals_torch_on_the_separate_parameters(
    optimizer: Any, cuts: list[int], unused_at: dict[int, set[str]]
) -> None:
    training = Training(optimizer=optimizer, **RECIPE)
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}
    bucket = plan(torch.float64)
    ours = FlatOptimizer(bucket, flat(bucket, parameters), training)
    theirs = torch_optimizer(training, parameters)
    for step in range(5):
        unused = unused_at.get(step, set())
        gradients = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for name, parameter in parameters.items():
            parameter.grad = None if name in unused else gradients[name]
        theirs.step()
        whole = flat(bucket, gradients)
        bounds = [0, *cuts, bucket.num_elements]
        pieces = [Piece(a, b, whole[a:b]) for a, b in pairwise(bounds)]
        ours.step(pieces, training.learning_rate, unused=unused)
        torch.testing.assert_close(ours.parameters, flat(bucket, parameters), rtol=1e-13, atol=1e-14)


def test_a_bucket_that_nobody_used_stands_still() -> None:
    bucket = plan(torch.float64)
    ours = FlatOptimizer(bucket, torch.ones(bucket.num_elements, dtype=torch.float64), Training(**RECIPE))
    before = [tensor.clone() for tensor in ours.state_tensors()]
    gradients = torch.zeros(bucket.num_elements, dtype=torch.float64)
    ours.step([Piece(0, bucket.num_elements, gradients)], 0.1, unused=set(SHAPES))
    assert bool((ours.parameters == 1).all())
    assert not any(tensor.any() for tensor in before)
    assert not any(tensor.any() for tensor in ours.state_tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_are_scaled_in_place_and_the_scale_is_told(dtype: torch.dtype) -> None:
    bucket = plan(dtype)
    torch.manual_seed(0)
    gradients = torch.randn(bucket.num_elements, dtype=dtype)
    clipped = gradients.clone()
    start = torch.randn(bucket.num_elements, dtype=dtype)
    scale = torch.tensor(4.0, dtype=torch.float64)
    one, other = (FlatOptimizer(bucket, start.clone(), Training(**RECIPE)) for _ in range(2))
    left = one.step([Piece(0, bucket.num_elements, clipped)], 0.1, gradient_scale=scale)
    assert other.step([Piece(0, bucket.num_elements, gradients / 4)], 0.1) is None
    assert left is not None
    assert torch.equal(one.parameters, other.parameters)
    assert torch.equal(clipped * left, gradients)


def test_with_masters_the_gradients_are_left_as_they_came() -> None:
    bucket = plan(torch.bfloat16)
    gradients = torch.ones(bucket.num_elements, dtype=torch.bfloat16)
    ours = FlatOptimizer(
        bucket, torch.ones(bucket.num_elements, dtype=torch.bfloat16), Training(**RECIPE), torch.float32
    )
    piece = Piece(0, bucket.num_elements, gradients)
    assert ours.step([piece], 0.1, gradient_scale=torch.tensor(4.0, dtype=torch.float64)) is None
    assert bool((gradients == 1).all())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_masters_move_where_bf16_alone_cannot(optimizer: Any) -> None:
    """Near 1 bf16 goes down in steps of 2^-8: an update below half of that is rounded away, every time."""
    bucket = plan(torch.bfloat16)
    training = Training(optimizer=optimizer, learning_rate=6e-4, weight_decay=0.0, momentum=0.0)
    gradients = [Piece(0, bucket.num_elements, torch.ones(bucket.num_elements, dtype=torch.bfloat16))]
    ones = torch.ones(bucket.num_elements, dtype=torch.bfloat16)
    with_masters = FlatOptimizer(bucket, ones.clone(), training, torch.float32)
    without = FlatOptimizer(bucket, ones.clone(), training)
    for _ in range(100):
        with_masters.step(gradients, training.learning_rate)
        without.step(gradients, training.learning_rate)
    moved = torch.full((bucket.num_elements,), 0.06)
    torch.testing.assert_close(1 - with_masters.master, moved, rtol=1e-4, atol=0)
    assert torch.equal(with_masters.parameters, with_masters.master.bfloat16())
    assert torch.equal(without.parameters, ones)


@pytest.mark.parametrize(("optimizer", "num_moments"), [("adamw", 2), ("sgd", 1)])
def test_states_are_moments_masters_and_a_counter_a_run(optimizer: Any, num_moments: int) -> None:
    bucket = plan(torch.bfloat16)
    parameters = torch.zeros(bucket.num_elements, dtype=torch.bfloat16)
    states = list(FlatOptimizer(bucket, parameters, Training(optimizer=optimizer), torch.float32).state_tensors())
    sizes = sorted(tensor.numel() * tensor.itemsize for tensor in states)
    assert sizes == [4, 4] + [4 * bucket.num_elements] * (1 + num_moments)
