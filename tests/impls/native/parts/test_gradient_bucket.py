"""A bucket of three parameters: `large` (2, 4), whose gradient is not small, `small` (3,) and `scalar` ()."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness import models
from harness.parameters import logical_parameters
from harness.workload import in_precision
from impls.native.parts.bucket_sums import Piece
from impls.native.parts.buckets import plan_buckets
from impls.native.parts.gradient_bucket import GradientBucket

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(2, 4, dtype=dtype))
        self.small = nn.Parameter(torch.ones(3, dtype=dtype))
        self.scalar = nn.Parameter(torch.ones((), dtype=dtype))


def make(dtype: torch.dtype = torch.float32, precision: str = "fp32") -> tuple[Model, GradientBucket]:
    model = Model(dtype)
    (plan,) = plan_buckets(logical_parameters(model, lambda name, tensor: tensor.ndim > 1), 1 << 20)
    workload = in_precision(models.load("awkward"), precision)
    gradients = torch.full((plan.num_elements,), torch.nan, dtype=torch.float32)
    return model, GradientBucket(plan, dict(model.named_parameters()), gradients, workload, CPU, small_bytes=4 * 8)


def seen(bucket: GradientBucket, name: str) -> Tensor:
    return bucket.gradient_views[name]


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16_fp32_gradients")])
def test_small_gradients_are_copied_first_and_added_later(dtype: torch.dtype, precision: str) -> None:
    model, bucket = make(dtype, precision)
    assert list(bucket.small) == ["small", "scalar"]
    bucket.start_step()
    model.large.grad = torch.ones_like(model.large)
    for step in (1, 2, 3):
        model.small.grad = torch.full_like(model.small, step)
        if step > 1:
            model.scalar.grad = torch.full_like(model.scalar, 5 * step)
        bucket.gather()
        assert model.small.grad is None
        assert model.scalar.grad is None
    assert model.large.grad is not None, "a large one is not gathered"
    assert bucket.filled == {"small", "scalar"}
    assert seen(bucket, "small").tolist() == [6.0, 6.0, 6.0]
    assert float(seen(bucket, "scalar")) == 25.0
    assert bool(seen(bucket, "large").isnan().all())


def test_what_comes_between_steps_is_forgotten() -> None:
    model, bucket = make()
    model.small.grad = torch.ones(3)
    bucket.start_step()
    bucket.gather()
    assert bucket.filled == set()


def test_only_what_no_rank_used_is_marked_after_the_sum() -> None:
    """The other rank has used `small`, with a gradient of zero, and neither of the others."""
    model, bucket = make()
    bucket.start_step()
    model.scalar.grad = torch.tensor(-0.0)
    bucket.gather()
    bucket.mark_unused()
    assert not bool(seen(bucket, "scalar").signbit()), "a used zero is a positive one"
    other = torch.zeros_like(bucket.gradients)
    other[0] = -0.0  # of `large`, which decays and so comes first
    other[-1] = -0.0  # of `scalar`
    total = bucket.gradients + other
    assert total.tolist() == [0.0] * total.numel()
    bucket.take([Piece(0, 5, total[:5]), Piece(5, total.numel(), total[5:])])
    assert bucket.unused == {"large"}


def test_a_replaced_parameter_is_named() -> None:
    model, bucket = make()
    assert bucket.replaced(dict(model.named_parameters())) is None
    model.small = nn.Parameter(torch.ones(3))
    assert bucket.replaced(dict(model.named_parameters())) == "small"
    model.large.data = model.large.data.clone()
    assert bucket.replaced(dict(model.named_parameters())) == "large"


def test_whole_gradients_are_those_before_clipping() -> None:
    model, bucket = make()
    bucket.start_step()
    model.small.grad, model.scalar.grad = torch.full((3,), 8.0), torch.tensor(4.0)
    bucket.gather()
    bucket.mark_unused()
    bucket.take([Piece(0, bucket.gradients.numel(), bucket.gradients)])
    bucket.update(0.1, torch.tensor(2.0, dtype=torch.float64))
    assert float(seen(bucket, "scalar")) == 2.0
    told = dict(bucket.whole_gradients())
    assert {name: value.tolist() for name, value in told.items()} == {"small": [8.0, 8.0, 8.0], "scalar": 4.0}
