"""The protocol of published shards, played by several ranks in one process; then real ranks over both transports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from impls.native.parts.gradient_shards import Flat
from impls.native.parts.parameter_gathers import SharedMemoryGathers
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds
    from tests.impls.native.parts.conftest import PlayedGroups, ReportedCollectives

SCENES = Path(__file__).parent / "exchange_scenes.py"
Play = Callable[..., list[SharedMemoryGathers]]
ODD = Flat(num_shard_elements=3, dtype=torch.float32, slot=0)
NEXT = Flat(num_shard_elements=5, dtype=torch.bfloat16, slot=1)
both = pytest.mark.parametrize("keeps_full", [True, False])


@pytest.fixture
def play(played_groups: PlayedGroups) -> Play:
    """Makes the gathers of `num_ranks` ranks over the same memory."""

    def make(num_ranks: int, *flats: Flat, keeps_full: bool, **others: Any) -> list[SharedMemoryGathers]:
        return [
            SharedMemoryGathers(
                flats, group, keeps_full=keeps_full, timeout_seconds=0.05, observer=others.get("observer")
            )
            for group in played_groups(num_ranks)
        ]

    return make


def publish(rank: SharedMemoryGathers, index: int, value: float) -> None:
    rank.shard(index).fill_(value)
    rank.publish(index)


@both
def test_a_gather_takes_what_its_owner_has_published_last(play: Play, keeps_full: bool) -> None:
    ranks = play(2, ODD, NEXT, keeps_full=keeps_full)
    for step in range(3):
        for number, rank in enumerate(ranks):
            publish(rank, 0, step + 10.0 * number)
            rank.start(0)
        for rank in ranks:
            rank.wait(0)
            assert rank.full(0).tolist() == [step + 0.0] * 3 + [step + 10.0] * 3


@both
def test_a_gather_waits_for_owners_and_names_who_is_late(play: Play, keeps_full: bool) -> None:
    ranks = play(3, ODD, NEXT, keeps_full=keeps_full)
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


def test_nothing_is_held_twice_where_flats_are_kept_whole(play: Play) -> None:
    _, second = play(2, ODD, NEXT, keeps_full=True)
    second.shard(0).fill_(7.0)
    assert second.full(0).tolist() == [0.0] * 3 + [7.0] * 3
    assert list(second.buffers()) == []


def test_flats_of_a_slot_take_turns_where_they_are_not_kept(play: Play) -> None:
    flats = [ODD, Flat(num_shard_elements=4, dtype=torch.bfloat16, slot=0)]
    ranks = play(2, *flats, keeps_full=False)
    first, _ = ranks
    (slot,) = first.buffers()
    assert slot.numel() == 2 * 3 * 4
    for index, value in ((0, 1.0), (1, 2.0), (0, 3.0)):
        for rank in ranks:
            publish(rank, index, value)
            rank.start(index)
        first.wait(index)
        assert first.full(index).tolist() == [value] * 2 * flats[index].num_shard_elements
        assert first.full(index).untyped_storage().data_ptr() == slot.untyped_storage().data_ptr()


def test_flats_that_are_kept_whole_cannot_take_turns(play: Play) -> None:
    with pytest.raises(ValueError, match="cannot take turns: expected 2 slots, got 1"):
        play(2, ODD, ODD, keeps_full=True)


def test_shards_outlive_the_gathers(play: Play) -> None:
    first, _ = play(2, ODD, keeps_full=True)
    shard, full = first.shard(0), first.full(0)
    first.close()
    shard.fill_(4.0)
    assert full.tolist() == [4.0] * 3 + [0.0] * 3


def test_a_null_step_moves_nothing_and_real_steps_go_on_after_it(play: Play, reported: ReportedCollectives) -> None:
    ranks = play(2, ODD, keeps_full=True, observer=reported)
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


@both
def test_one_rank_reports_nothing(play: Play, reported: ReportedCollectives, keeps_full: bool) -> None:
    (rank,) = play(1, ODD, keeps_full=keeps_full, observer=reported)
    publish(rank, 0, 5.0)
    rank.start(0)
    rank.wait(0)
    assert rank.full(0).tolist() == [5.0] * 3
    assert reported.launches == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ways_gather_what_the_owners_have(worlds: Worlds, world_size: int) -> None:
    worlds.adopt(parity_case("awkward", f"{SCENES}:Exchange", world_size, options={"scenario": "parameter_gathers"}))
