from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from impls.native.parts.collectives import BackgroundCollectives, ring_all_reduce
from impls.native.parts.tensor_exchange import ProcessGroupExchange
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

PROBES = Path(__file__).parents[1] / "probes.py"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ring_and_parameter_server_sum_over_all_ranks(worlds: Worlds, world_size: int) -> None:
    options = {"scenario": "composed_collectives"}
    worlds.adopt(parity_case("awkward", f"{PROBES}:Probe", world_size, options=options))


def test_background_collectives_keep_their_order_and_raise_where_they_are_waited_for() -> None:
    background = BackgroundCollectives("test")
    order: list[int] = []

    def collective(buffer: torch.Tensor, group: object) -> None:
        if buffer.numel() == 2:
            raise RuntimeError("the peer is gone")
        order.append(buffer.numel())

    handles = [background.start(collective, torch.zeros(n), None) for n in (3, 1, 2, 5)]
    for handle in (handles[3], handles[0], handles[1]):
        handle.wait()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        handles[2].wait()
    assert order == [3, 1, 5]
    background.close()


class _Seat:
    """One rank of a group that exchanges nothing: what it sends and receives is written down."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._num_ranks

    def wait(self) -> None:
        pass


def _ring(seat: Any) -> None:
    ring_all_reduce(torch.zeros(7), seat)


def _scatter_sum(seat: Any) -> None:
    ProcessGroupExchange(seat).start_scatter_sum(torch.zeros(8, 3), 0, [8 // seat.size()] * seat.size())()


@pytest.mark.parametrize("exchange", [_ring, _scatter_sum])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_both_of_a_pair_ask_for_their_messages_in_one_order(
    num_ranks: int, exchange: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL wants it, see [Note: Pairs of messages]; gloo would not mind."""
    asked: dict[tuple[int, int], list[str]] = {}  # (a rank, its peer) -> who sends

    def isend(_tensor: torch.Tensor, *, group: Any, group_dst: int) -> Any:
        asked.setdefault((group.rank(), group_dst), []).append(f"{group.rank()} sends")
        return group

    def irecv(_tensor: torch.Tensor, *, group: Any, group_src: int) -> Any:
        asked.setdefault((group.rank(), group_src), []).append(f"{group_src} sends")
        return group

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    for rank in range(num_ranks):
        exchange(_Seat(rank, num_ranks))
    assert asked
    for (rank, peer), messages in asked.items():
        assert messages == asked[peer, rank]
