"""The protocol of published shards, played by several ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from impls.native.parts.gradient_shards import Flat
from impls.native.parts.shared_parameters import ParametersInPlace, SharedMemoryGathers

if TYPE_CHECKING:
    from tests.impls.native.parts.conftest import PlayedGroups, ReportedCollectives

Kind = type[SharedMemoryGathers] | type[ParametersInPlace]
Gathers = SharedMemoryGathers | ParametersInPlace
Play = Callable[..., list[Any]]
ODD = Flat(num_shard_elements=3, dtype=torch.float32, slot=0)
NEXT = Flat(num_shard_elements=5, dtype=torch.bfloat16, slot=1)
both = pytest.mark.parametrize("kind", [SharedMemoryGathers, ParametersInPlace])


@pytest.fixture
def play(played_groups: PlayedGroups) -> Play:
    """Makes the gathers of `num_ranks` ranks over the same memory."""

    def make(kind: Kind, num_ranks: int, *flats: Flat, observer: Any = None) -> list[Any]:
        return [kind(flats, group, timeout_seconds=0.05, observer=observer) for group in played_groups(num_ranks)]

    return make


def publish(rank: Gathers, index: int, value: float) -> None:
    rank.shard(index).fill_(value)
    rank.publish(index)


@both
def test_a_gather_takes_what_its_owner_has_published_last(play: Play, kind: Kind) -> None:
    ranks = play(kind, 2, ODD, NEXT)
    for step in range(3):
        for number, rank in enumerate(ranks):
            publish(rank, 0, step + 10.0 * number)
            rank.start(0)
        for rank in ranks:
            rank.wait(0)
            assert rank.full(0).tolist() == [step + 0.0] * 3 + [step + 10.0] * 3


@both
def test_a_gather_waits_for_owners_and_names_who_is_late(play: Play, kind: Kind) -> None:
    ranks = play(kind, 3, ODD, NEXT)
    for index in (0, 1):
        for rank in ranks:
            publish(rank, index, 1.0)
            rank.start(index)
        for rank in ranks:
            rank.wait(index)
    publish(ranks[0], 1, 2.0)
    publish(ranks[2], 1, 2.0)
    ranks[0].start(1)
    with pytest.raises(TimeoutError, match=r"rank 10 waited 0\.05 s for rank 11 to have published flat 1"):
        ranks[0].wait(1)
    ranks[0].start(0)  # the other flat is as it was
    ranks[0].wait(0)


@both
def test_a_rank_holds_its_part_once(play: Play, kind: Kind) -> None:
    """Of what each rank keeps whole its shard is a part; of what lies there once it lists its shard alone."""
    _, second = play(kind, 2, ODD, NEXT)
    second.shard(0).fill_(7.0)
    assert second.full(0).tolist() == [0.0] * 3 + [7.0] * 3
    assert list(second.buffers()) == []
    if kind is ParametersInPlace:
        assert second.shard(0).untyped_storage().nbytes() == 3 * 4


def test_in_place_there_is_one_full_for_all(play: Play) -> None:
    first, second = play(ParametersInPlace, 2, ODD, NEXT)
    first.shard(1).fill_(1.0)
    second.shard(1).fill_(2.0)
    for rank in (first, second):
        assert rank.full(1).tolist() == [1.0] * 5 + [2.0] * 5
        assert rank.full(0).tolist() == [0.0] * 6


def test_in_place_nobody_updates_before_all_have_come_to_the_end_of_backward(play: Play) -> None:
    first, second = play(ParametersInPlace, 2, ODD)
    looked = []
    with pytest.raises(TimeoutError, match=r"rank 10 waited 0\.05 s for rank 11 to have finished its backward"):
        first.begin_update(lambda: looked.append(1))
    assert looked, "the meantime is not used"
    first, second = play(ParametersInPlace, 2, ODD)
    for _ in range(3):
        waiting = threading.Thread(target=first.begin_update, args=(lambda: None,))
        waiting.start()
        waiting.join(0.01)
        assert waiting.is_alive()
        second.begin_update(lambda: None)
        waiting.join(10)
        assert not waiting.is_alive()


def test_flats_that_are_kept_whole_cannot_take_turns(play: Play) -> None:
    with pytest.raises(ValueError, match="cannot take turns: expected 2 slots, got 1"):
        play(SharedMemoryGathers, 2, ODD, ODD)


@both
def test_shards_outlive_the_gathers(play: Play, kind: Kind) -> None:
    first, _ = play(kind, 2, ODD)
    shard, full = first.shard(0), first.full(0)
    first.close()
    shard.fill_(4.0)
    assert full.tolist() == [4.0] * 3 + [0.0] * 3


def test_a_null_step_moves_nothing_and_real_steps_go_on_after_it(play: Play, reported: ReportedCollectives) -> None:
    ranks = play(SharedMemoryGathers, 2, ODD, observer=reported)
    for step, null in enumerate((False, True, True, False)):
        reported.null = null
        for rank in ranks:
            publish(rank, 0, float(step))
            rank.start(0)
        for rank in ranks:
            rank.wait(0)
        assert ranks[0].full(0)[-1].item() == (0.0 if null else step)
    assert reported.launches == [("all_gather", (10, 11), 2 * 3 * 4, 3 * 4)] * 2 * 2
    assert sorted(reported.completions) == list(range(4))


def test_a_null_step_in_place_waits_for_nobody(play: Play, reported: ReportedCollectives) -> None:
    first, second = play(ParametersInPlace, 2, ODD, observer=reported)
    for step, null in enumerate((False, True, True, False)):
        reported.null = null
        if null:
            first.begin_update(lambda: None)
            first.start(0)
            first.wait(0)
            continue
        other = threading.Thread(target=second.begin_update, args=(lambda: None,))
        other.start()
        first.begin_update(lambda: None)
        other.join(10)
        for rank in (first, second):
            publish(rank, 0, float(step))
            rank.start(0)
        for rank in (first, second):
            rank.wait(0)
    operations = [operation for operation, *_ in reported.launches]
    assert sorted(operations) == ["all_gather"] * 4 + ["barrier"] * 4
    assert reported.wire_bytes.count(3 * 4) == 4
    assert sorted(reported.completions) == list(range(8))


@both
def test_one_rank_reports_nothing(play: Play, reported: ReportedCollectives, kind: Kind) -> None:
    (rank,) = play(kind, 1, ODD, observer=reported)
    rank.begin_update(lambda: None)
    publish(rank, 0, 5.0)
    rank.start(0)
    rank.wait(0)
    assert rank.full(0).tolist() == [5.0] * 3
    assert reported.launches == []
