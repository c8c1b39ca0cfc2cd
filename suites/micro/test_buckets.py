"""Buckets of one rank: their plan, how gradients come into them, how parameters leave them, one update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import models
from harness.measure.predicted_memory import registry
from harness.optimizer import RecipeOptimizer
from harness.workload import Workload, in_precision
from impls.native.parts.bucket_sums import Piece
from impls.native.parts.buckets import plan_buckets
from impls.native.parts.gradient_bucket import GradientBucket

_CPU = torch.device("cpu")
_WORKLOAD = "gpt:size=17m,vocabulary_size=512"
_LEARNING_RATE = 1e-4
_LARGE_BYTES = 1 << 40


@pytest.fixture(scope="module")
def workload() -> Workload:
    return in_precision(models.load(_WORKLOAD), "fp32")


@pytest.fixture(scope="module")
def bucket(workload: Workload) -> GradientBucket:
    """The whole model in one, every gradient of it "small": all of them come over together."""
    (plan,) = plan_buckets(registry(workload), _LARGE_BYTES)
    parameters = dict(workload.build_model().named_parameters())
    gradients = torch.zeros(plan.num_elements)
    return GradientBucket(plan, parameters, gradients, workload, _CPU, small_bytes=_LARGE_BYTES)


def test_plan(benchmark: Any, workload: Workload) -> None:
    parameters = registry(workload)
    plans = benchmark.pedantic(plan_buckets, args=(parameters, 1 << 20), rounds=50, iterations=5, warmup_rounds=2)
    assert sum(plan.num_elements for plan in plans) == sum(parameter.num_elements for parameter in parameters)


def test_pack(benchmark: Any, bucket: GradientBucket) -> None:
    """Gradients where autograd left them, into the flat buffer."""
    made = {name: torch.ones_like(parameter) for name, parameter in bucket.parameters.items()}

    def backward() -> None:
        bucket.start_step()
        for name, parameter in bucket.parameters.items():
            parameter.grad = made[name]

    benchmark.pedantic(bucket.gather, setup=backward, rounds=30, warmup_rounds=2)
    assert bool((bucket.gradients == 1).all())


def test_unpack(benchmark: Any, bucket: GradientBucket) -> None:
    """The flat buffer, into a tensor of each parameter's shape, as copies that others may keep."""
    whole = benchmark.pedantic(
        lambda: dict(bucket.whole(bucket.optimizer.parameters)), rounds=30, iterations=1, warmup_rounds=2
    )
    assert all(torch.equal(whole[name], parameter) for name, parameter in bucket.parameters.items())


def test_flat_update(benchmark: Any, bucket: GradientBucket) -> None:
    pieces = [Piece(0, bucket.plan.num_elements, torch.full((bucket.plan.num_elements,), 1e-3))]
    before = bucket.optimizer.parameters.clone()
    benchmark.group = "update"
    benchmark.pedantic(bucket.optimizer.step, args=(pieces, _LEARNING_RATE), rounds=20, iterations=1, warmup_rounds=2)
    assert not torch.equal(bucket.optimizer.parameters, before)


def test_torch_update(benchmark: Any, workload: Workload) -> None:
    """The same by torch's own optimizer, parameter by parameter."""
    model = workload.build_model()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = RecipeOptimizer(model, workload)
    benchmark.group = "update"
    benchmark.pedantic(optimizer.step, kwargs={"tracks_norm": False}, rounds=20, iterations=1, warmup_rounds=2)
    assert not torch.equal(next(model.parameters()), next(workload.build_model().parameters()))
