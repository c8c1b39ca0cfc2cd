"""Elements in common, held against views of one matrix."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.overlaps import kept_tensors, share_elements

MATRIX = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (MATRIX[:, :3], MATRIX[:, 3:], False),
        (MATRIX[:, :3], MATRIX[:, 2:], True),
        (MATRIX[:, 3:], MATRIX[2:, 4:], True),
        (MATRIX[::2], MATRIX[1::2], False),
        (MATRIX[:, :3], MATRIX[3, 1:3].expand(2, 2), True),
        (MATRIX[:, :3], MATRIX.view(torch.int32)[0, :1], True),
        (MATRIX, MATRIX.clone(), False),
        (MATRIX, MATRIX[:0], False),
    ],
)
def test_views_that_lie_between_each_other_share_nothing(one: Tensor, other: Tensor, shared: bool) -> None:
    assert share_elements(one, other) is share_elements(other, one) is shared


def test_tensors_without_memory_share_nothing() -> None:
    with FakeTensorMode():
        fake = torch.zeros(4, 6)
    assert not share_elements(fake, fake[:, :3])
    assert not share_elements(torch.zeros(3, device="meta"), MATRIX)


def test_buffers_and_attributes_are_kept_and_parameters_are_not() -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("count", torch.zeros(()))
    layer.held = {"again": layer.weight, "rows": [torch.zeros(3)]}
    assert [place for place, _ in kept_tensors(nn.Sequential(layer))] == ["0.held['rows'][0]", "0.count"]
