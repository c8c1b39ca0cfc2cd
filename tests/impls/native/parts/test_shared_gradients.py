"""The protocol of shared slots, played by several ranks in one process, one move at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from impls.native.parts.gradient_shards import Flat
from impls.native.parts.shared_gradients import SharedMemoryShards

if TYPE_CHECKING:
    from tests.impls.native.parts.conftest import PlayedGroups, ReportedCollectives

Play = Callable[..., list[SharedMemoryShards]]
ODD = Flat(num_shard_elements=33, dtype=torch.float32, slot=0)


@pytest.fixture
def play(played_groups: PlayedGroups) -> Play:
    """Makes the shards of `num_ranks` ranks over the same memory."""

    def make(num_ranks: int, *flats: Flat, **others: Any) -> list[SharedMemoryShards]:
        return [
            SharedMemoryShards(flats, group, timeout_seconds=0.05, observer=others.get("observer"))
            for group in played_groups(num_ranks)
        ]

    return make


def start(rank: SharedMemoryShards, index: int, value: float, *, add: bool = False) -> torch.Tensor:
    """Fills the flat with `value`; where the sum will be, which holds 100 before."""
    own = rank.own(index).fill_(value)
    into = torch.full((own.numel() // rank._num_ranks,), 100.0, dtype=own.dtype)
    rank.start(index, into, add=add)
    return into


def test_a_shard_is_summed_once_all_have_published(play: Play) -> None:
    first, second = play(2, ODD)
    first_sum = start(first, 0, 1.0)
    first.progress()
    assert first_sum.tolist() == [100.0] * 33
    second_sum = start(second, 0, 2.0, add=True)  # sums its own shard at once
    assert second_sum.tolist() == [103.0] * 33
    assert first_sum.tolist() == [100.0] * 33
    first.progress()
    assert first_sum.tolist() == [3.0] * 33
    assert first.own(0).tolist() == [1.0] * 66
    first.wait(0)


def test_the_sum_may_land_in_the_gradients_own_shard(play: Play) -> None:
    ranks = play(3, ODD)
    for number, rank in enumerate(ranks):
        rank.own(0).fill_(10.0**number)
        rank.start(0, rank.own(0)[33 * number : 33 * (number + 1)], add=False)
    for number, rank in enumerate(ranks):
        rank.wait(0)
        expected = torch.full((3, 33), 10.0**number)
        expected[number] = 111.0
        assert torch.equal(rank.own(0).view(3, 33), expected)


def test_a_fast_rank_may_not_fill_a_slot_that_a_slow_one_still_reads(play: Play) -> None:
    turns = Flat(num_shard_elements=5, dtype=torch.float64, slot=0)
    elsewhere = Flat(num_shard_elements=5, dtype=torch.float64, slot=7)
    fast, slow = play(2, ODD, turns, elsewhere)
    fast.reclaim(0)
    start(fast, 0, 1.0)
    fast.reclaim(2)  # nobody has used that slot
    with pytest.raises(TimeoutError, match=r"rank 10 waited 0\.05 s for rank 11 to have published flat 0"):
        fast.reclaim(1)
    progress, slow.progress = slow.progress, lambda: None  # type: ignore[method-assign]
    slow_sum = start(slow, 0, 2.0)  # and stops there
    fast.wait(0)
    with pytest.raises(TimeoutError, match=r"rank 10 waited 0\.05 s for rank 11 to have reduced flat 0"):
        fast.reclaim(1)
    slow.progress = progress  # type: ignore[method-assign]
    slow.reclaim(1)  # sums its own shard meanwhile
    assert slow_sum.tolist() == [3.0] * 33
    fast.reclaim(1)
    fast_sum = start(fast, 1, 4.0)
    start(slow, 1, 5.0)
    fast.wait(1)
    assert fast_sum.tolist() == [9.0] * 5


def test_what_comes_after_sums_keeps_to_their_order(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a look at an earlier flat and one at a later both may have arrived."""
    flats = [Flat(num_shard_elements=33, dtype=torch.float32, slot=slot) for slot in range(2)]
    first, second = play(2, *flats)
    called: list[int] = []
    for index in range(2):
        first.own(index).fill_(1.0)
        first.start(index, torch.zeros(33), add=False, then=partial(called.append, index))
    for index in range(2):
        start(second, index, 2.0)
    look = first._region.all_reached
    monkeypatch.setattr(first._region, "all_reached", lambda flag, index, epoch: index and look(flag, index, epoch))
    first.progress()
    assert list(first._unreduced) == [0]
    assert called == []
    monkeypatch.undo()
    first.progress()
    assert called == [0, 1]


@pytest.mark.parametrize("silent", [1, 2])
def test_a_peer_that_never_starts_is_named_in_time(play: Play, silent: int) -> None:
    ranks = play(3, ODD, Flat(num_shard_elements=33, dtype=torch.float32, slot=1))
    for number, rank in enumerate(ranks):
        if number != silent:
            start(rank, 1, 1.0)
    with pytest.raises(TimeoutError, match=rf"rank 10 waited 0\.05 s for rank {10 + silent} to have published flat 1"):
        ranks[0].wait(1)


def test_a_null_step_goes_on_with_its_own_share(play: Play, reported: ReportedCollectives) -> None:
    ranks = play(2, ODD, observer=reported)
    for null in (False, True, True, False):
        reported.null = null
        for rank in ranks:
            rank.reclaim(0)
        sums = [start(rank, 0, 2.0) for rank in ranks]
        for rank in ranks:
            rank.wait(0)
        assert [total[0].item() for total in sums] == [2.0 if null else 4.0] * 2
    assert reported.launches == [("reduce_scatter", (10, 11), 2 * 33 * 4, 33 * 4)] * 2 * 2
    assert sorted(reported.completions) == list(range(4))
    assert set(reported.blocks) == set(range(4))


def test_what_began_before_a_null_step_ends_in_it(play: Play, reported: ReportedCollectives) -> None:
    ranks = play(2, ODD, observer=reported)
    sums = [start(rank, 0, 2.0) for rank in ranks]
    reported.null = True
    for rank, total in zip(ranks, sums, strict=True):
        rank.wait(0)
        assert total.tolist() == [4.0] * 33


@pytest.mark.parametrize(("num_ranks", "wire_bytes"), [(1, []), (2, [132] * 2), (3, [264] * 3)])
def test_reports_what_a_rank_reads_of_its_peers(
    play: Play, reported: ReportedCollectives, num_ranks: int, wire_bytes: list[int]
) -> None:
    for rank in play(num_ranks, ODD, observer=reported):
        start(rank, 0, 1.0)
    assert reported.wire_bytes == wire_bytes


def test_holds_each_slot_once_at_its_largest_flat(play: Play) -> None:
    flats = [Flat(num_shard_elements=n, dtype=d, slot=s) for n, d, s in [(8, torch.float32, 3), (5, torch.float64, 3)]]
    (rank, _) = play(2, *flats)
    (slot,) = rank.buffers()
    assert slot.numel() == 2 * 5 * 8
    assert {rank.own(index).untyped_storage().data_ptr() for index in (0, 1)} == {slot.untyped_storage().data_ptr()}
