from __future__ import annotations

import mmap

import pytest
import torch

from impls.native.parts import flat_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_elements", [0, 1, 1000, 3 << 20])
def test_zeros_are_zeros_that_can_be_written(num_elements: int) -> None:
    flat = flat_memory.zeros(num_elements, torch.float32, CPU)
    assert flat.shape == (num_elements,)
    assert not flat.any()
    flat.fill_(1.0)
    assert float(flat.sum()) == num_elements


def test_large_buffers_start_on_a_huge_page() -> None:
    assert flat_memory.zeros(3 << 20, torch.float32, CPU).data_ptr() % (2 << 20) == 0


def test_a_lack_of_memory_is_said_with_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="needs 12582912 bytes: Cannot allocate memory"):
        flat_memory.zeros(3 << 20, torch.float32, CPU)


@pytest.mark.parametrize(
    ("destination", "source"),
    [
        (torch.zeros(3, 4), torch.randn(3, 4)),
        (torch.zeros(4, 3).t(), torch.randn(4, 3).t()),
        (torch.zeros(4, 3).t(), torch.randn(3, 4)),  # unlike strides
        (torch.zeros(3, 4), torch.ones(1).expand(3, 4)),  # all elements are one
        (torch.zeros(3, 4, dtype=torch.float64), torch.randn(3, 4)),  # unlike dtypes
        (torch.zeros(6, 4)[::2], torch.randn(6, 4)[::2]),  # gaps
        (torch.zeros(0, 4), torch.zeros(0, 4)),
        (torch.zeros(()), torch.tensor(3.0)),
    ],
    ids=["plain", "transposed", "strides", "expanded", "dtypes", "gaps", "empty", "scalar"],
)
def test_copies_what_copy_would(destination: torch.Tensor, source: torch.Tensor) -> None:
    flat_memory.copy_into(destination, source)
    assert torch.equal(destination, source.to(destination.dtype))


def test_a_copy_leaves_the_gaps_alone() -> None:
    whole = torch.zeros(6, 4)
    flat_memory.copy_into(whole[::2], torch.ones(6, 4)[::2])
    assert not whole[1::2].any()


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
        (torch.zeros(()), True),
        (torch.zeros(4, 3)[::2], False),
        (torch.zeros(1).expand(5), False),
        (torch.zeros(0, 3), False),
    ],
)
def test_dense_is_one_piece_each_element_once(tensor: torch.Tensor, dense: bool) -> None:
    assert flat_memory.is_dense(tensor) is dense


def test_what_is_lent_goes_and_comes_back_for_all_its_views() -> None:
    flat = flat_memory.lent(6, torch.float32, CPU)
    half = flat[3:]
    flat_memory.give_back(flat)
    assert flat.untyped_storage().nbytes() == 0
    flat_memory.take(flat, "gradients")
    half.fill_(2.0)
    flat_memory.take(flat, "gradients")  # it has some: nothing happens
    assert flat[3:].tolist() == [2.0] * 3
