from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.parameters import LogicalParameter
from impls.native.parts.buckets import flatten_parameters, plan_buckets, view_like


def parameter(
    name: str, *shape: int, decayed: bool = True, dtype: torch.dtype = torch.float32, trainable: bool = True
) -> LogicalParameter:
    return LogicalParameter(name=name, shape=shape, dtype=dtype, trainable=trainable, decayed=decayed)


def layout(plan: tuple, index: int) -> list[tuple[str, int, int]]:
    return [(segment.parameter.name, segment.start, segment.stop) for segment in plan[index].segments]


def test_buckets_are_filled_in_order_up_to_their_capacity() -> None:
    plans = plan_buckets([parameter("a", 2), parameter("b", 3), parameter("c", 1), parameter("d", 4)], 5 * 4)
    assert [layout(plans, index) for index in range(len(plans))] == [
        [("a", 0, 2), ("b", 2, 5)],
        [("c", 0, 1), ("d", 1, 5)],
    ]


def test_a_parameter_above_the_capacity_gets_a_bucket_of_its_own() -> None:
    plans = plan_buckets([parameter("a", 1), parameter("large", 100), parameter("b", 1)], 8)
    assert [[s.parameter.name for s in plan.segments] for plan in plans] == [["a"], ["large"], ["b"]]


def test_decayed_parameters_come_first_in_a_bucket() -> None:
    plans = plan_buckets([parameter("bias", 2, decayed=False), parameter("weight", 2, 2)], 1000)
    assert layout(plans, 0) == [("weight", 0, 4), ("bias", 4, 6)]


def test_dtypes_get_buckets_of_their_own_ordered_by_their_last_parameter() -> None:
    low = torch.bfloat16
    plans = plan_buckets([parameter("a", 4), parameter("b", 4, dtype=low), parameter("c", 4)], 1000)
    assert [(plan.dtype, [s.parameter.name for s in plan.segments]) for plan in plans] == [
        (low, ["b"]),
        (torch.float32, ["a", "c"]),
    ]


def test_empty_and_scalar_parameters_have_their_places() -> None:
    plans = plan_buckets([parameter("a", 8), parameter("empty", 0, 13), parameter("scalar"), parameter("b", 24)], 1000)
    assert layout(plans, 0) == [("a", 0, 8), ("empty", 8, 8), ("scalar", 8, 9), ("b", 9, 33)]
    assert plans[0].num_elements == 33


def test_nothing_to_train_gives_no_bucket() -> None:
    assert plan_buckets([], 1000) == ()


def test_capacity_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte, got 0"):
        plan_buckets([parameter("a", 2)], 0)


def test_parameters_become_views_of_the_flat_buffer_and_keep_values_and_strides() -> None:
    torch.manual_seed(0)
    tensors = {
        "scalar": nn.Parameter(torch.tensor(0.5)),
        "transposed": nn.Parameter(torch.randn(3, 5).t()),
        "channels_last": nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        "strided": nn.Parameter(torch.randn(8)[::2]),
    }
    before = {name: (p.detach().clone(), p.stride()) for name, p in tensors.items()}
    (plan,) = plan_buckets([parameter(name, *p.shape) for name, p in tensors.items()], 10_000)
    flat = flatten_parameters(plan, tensors, torch.device("cpu"))
    for segment in plan.segments:
        name = segment.parameter.name
        value, stride = before[name]
        assert torch.equal(tensors[name], value)
        assert tensors[name].data_ptr() == flat[segment.start :].data_ptr()
        assert tensors[name].stride() == ((1,) if name == "strided" else stride)
    flat.zero_()
    assert all(not p.any() for p in tensors.values())


def test_a_view_starts_at_its_segment_of_a_buffer_that_itself_starts_late() -> None:
    (plan,) = plan_buckets([parameter("a", 2), parameter("b", 2, 2)], 1000)
    late = torch.arange(10.0)[4:]
    view = view_like(late, plan.segments[1], torch.empty(2, 2).t())
    assert view.tolist() == [[6.0, 8.0], [7.0, 9.0]]


def test_the_last_buckets_are_smaller() -> None:
    """Each takes at most half of what is left, down to the least."""
    parameters = [parameter(f"p{index}", 100) for index in range(16)]
    plans = plan_buckets(parameters, 1600, least_bytes=400)
    sizes = [plan.num_elements * 4 for plan in plans]
    assert sizes == [1600, 1600, 1600, 800, 400, 400]
