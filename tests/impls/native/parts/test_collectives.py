from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from impls.native.parts.collectives import BackgroundCollectives
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
