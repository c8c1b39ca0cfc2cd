from __future__ import annotations

import pytest
import torch

from impls.native.parts import ordered_sum

ONE_BLOCK = ordered_sum.BLOCK_BYTES // 4  # elements of fp32


@pytest.mark.parametrize("num_elements", [0, 1, 1000, 2 * ONE_BLOCK, 2 * ONE_BLOCK + 7])
@pytest.mark.parametrize("num_summands", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adds_from_the_first_to_the_last(num_elements: int, num_summands: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_elements + num_summands)
    summands = [torch.randn(num_elements, generator=generator).to(dtype) for _ in range(num_summands)]
    expected = summands[0].clone()
    for summand in summands[1:]:
        expected = expected + summand
    before = torch.randn(num_elements, generator=generator).to(dtype)
    into = torch.full_like(before, torch.nan)
    ordered_sum.write(summands, into, add=False)
    assert torch.equal(into, expected)
    into.copy_(before)
    ordered_sum.write(summands, into, add=True)
    assert torch.equal(into, before + expected)


@pytest.mark.parametrize("num_summands", [1, 2, 3, 4])
def test_any_summand_may_be_overwritten_and_no_other_changes(num_summands: int) -> None:
    for place in range(num_summands):
        summands = [torch.full((ONE_BLOCK + 5,), 10.0**i) for i in range(num_summands)]
        others = [(summand, summand.clone()) for i, summand in enumerate(summands) if i != place]
        expected = torch.stack(summands).sum(0)
        ordered_sum.write(summands, summands[place], add=False)
        assert torch.equal(summands[place], expected)
        assert all(torch.equal(summand, before) for summand, before in others)


def test_refuses_room_of_another_size() -> None:
    with pytest.raises(ValueError, match=r"expected room for \(3,\), got \(4,\)"):
        ordered_sum.write([torch.ones(3), torch.ones(3)], torch.ones(4), add=True)


@pytest.mark.parametrize("num_summands", [1, 2, 3])
@pytest.mark.parametrize("add", [False, True])
def test_a_sum_is_minus_zero_where_all_are(num_summands: int, add: bool) -> None:
    into = torch.tensor([-0.0, -0.0])
    minus, plus = torch.tensor([-0.0, -0.0]), torch.tensor([-0.0, 0.0])
    ordered_sum.write([*[minus] * (num_summands - 1), plus], into, add=add)
    assert torch.signbit(into).tolist() == [True, False]
