"""Blocks from an allocator's changes, and the bytes alive at any time."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness.measure.allocations import FOREVER, Block, Curve, EmptyProfile, pair, read_profile

CPU = torch.device("cpu")


def test_changes_pair_into_blocks_in_any_order() -> None:
    changes = [(1, 0xA, 100), (2, 0xB, 10), (3, 0xA, -100), (5, 0xA, 7)]
    expected = (Block(0xA, 100, 1, 3), Block(0xB, 10, 2, FOREVER), Block(0xA, 7, 5, FOREVER))
    assert pair(changes) == expected
    assert pair(reversed(changes)) == expected


def test_a_free_of_something_older_than_the_profile_is_left_out() -> None:
    assert pair([(1, 0xA, -100), (2, 0xB, 10)]) == (Block(0xB, 10, 2, FOREVER),)


def test_an_unseen_free_ends_when_the_address_is_used_again() -> None:
    assert pair([(1, 0xA, 100), (4, 0xA, 60)]) == (Block(0xA, 100, 1, 4), Block(0xA, 60, 4, FOREVER))


def test_bytes_alive_and_their_peak() -> None:
    #   time   1    2    3    4    5
    #   0xA   [100 ............)
    #   0xB        [10 .)
    #   0xC                       [50
    curve = Curve([Block(0xA, 100, 1, 4), Block(0xB, 10, 2, 3), Block(0xC, 50, 5, FOREVER)])
    assert [curve.at(time) for time in range(7)] == [0, 100, 110, 100, 0, 50, 50]
    assert curve.peak(0, 9) == (110, 2)
    assert curve.peak(3, 5) == (100, 3)
    assert curve.peak(4, 4) == (0, 4)


def test_a_birth_at_the_time_of_a_death_does_not_understate_the_peak() -> None:
    assert Curve([Block(0xA, 100, 1, 4), Block(0xB, 60, 4, 9)]).peak(2, 9) == (160, 4)


def test_the_profiler_sees_every_allocation_exactly() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = torch.empty(1000)
        with record_function("mine.inner"):
            del kept
            kept = torch.empty(3, dtype=torch.float64)
    timeline = read_profile(profiler, CPU, "mine.")
    assert [block.num_bytes for block in timeline.blocks] == [4000, 24]
    (mark,) = timeline.marked("mine.inner")
    first, second = timeline.blocks
    assert first.born < mark.begin < first.died < second.born < mark.end
    assert (second.address, second.died) == (kept.data_ptr(), FOREVER)


def test_a_silently_empty_profile_is_an_error() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as without_memory:
        torch.empty(1000)
    with pytest.raises(EmptyProfile, match="record allocations on cpu, it recorded none"):
        read_profile(without_memory, CPU, "mine.")
