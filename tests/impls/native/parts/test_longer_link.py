"""Shared memory on a longer link: what has not arrived is not looked at, and holds up whoever waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from impls.native.parts.gradient_shards import Flat
from impls.native.parts.shared_gradients import SharedMemoryShards
from impls.native.parts.shared_memory import SharedBuffers
from impls.native.parts.shared_parameters import SharedMemoryGathers

if TYPE_CHECKING:
    from tests.impls.native.parts.conftest import PlayedGroups, ReportedCollectives

FLAT = Flat(num_shard_elements=4, dtype=torch.float32, slot=0)
Exchange = tuple[Callable[[], None], Callable[[], None], Callable[[], torch.Tensor]]  # progress, wait, the first result


def sums(groups: PlayedGroups, reported: ReportedCollectives) -> Exchange:
    ranks = [SharedBuffers([(32, torch.float32)], group, timeout_seconds=5, observer=reported) for group in groups(2)]
    for rank in ranks:
        rank.own(0).fill_(1.0)
        rank.publish(0)
    return ranks[0].progress, lambda: _both(ranks, lambda rank: rank.wait(0)), lambda: ranks[0].sums(0)[0][2][:1]


def shards(groups: PlayedGroups, reported: ReportedCollectives) -> Exchange:
    ranks = [SharedMemoryShards([FLAT], group, timeout_seconds=5, observer=reported) for group in groups(2)]
    into = [torch.zeros(4) for _ in ranks]
    for rank, total in zip(ranks, into, strict=True):
        rank.own(0).fill_(1.0)
        rank.start(0, total, add=False)
    return ranks[0].progress, lambda: _both(ranks, lambda rank: rank.wait(0)), lambda: into[0][:1]


def gathers(groups: PlayedGroups, reported: ReportedCollectives) -> Exchange:
    ranks = [SharedMemoryGathers([FLAT], group, timeout_seconds=5, observer=reported) for group in groups(2)]
    for rank in ranks:
        rank.shard(0).fill_(2.0)
        rank.publish(0)
    for rank in ranks:
        rank.start(0)
    return lambda: None, lambda: _both(ranks, lambda rank: rank.wait(0)), lambda: ranks[0].full(0)[-1:]


def _both(ranks: list, wait: Callable) -> None:
    threads = [threading.Thread(target=wait, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)


@pytest.mark.parametrize("begin", [sums, shards, gathers])
def test_what_has_not_arrived_is_waited_for(
    begin: Callable[..., Exchange], played_groups: PlayedGroups, reported: ReportedCollectives
) -> None:
    reported.on_their_way = {0, 1}
    progress, wait, result = begin(played_groups, reported)
    progress()
    assert result().item() != 2.0, "nobody looked before it had arrived"
    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert reported.completions == []
    reported.on_their_way = set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert result().item() == 2.0
    assert sorted(reported.completions) == [0, 1]
