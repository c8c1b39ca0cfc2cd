"""Flats, and their sums by real ranks over all transports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from harness.layout import Layout
from harness.topology import Placement, Topology
from impls.native.parts.gradient_shards import Flat
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

SCENES = Path(__file__).parent / "exchange_scenes.py"


def test_a_negative_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a shard of at least 0 elements, got -1"):
        Flat(num_shard_elements=-1, dtype=torch.float32, slot=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ways_give_each_rank_the_sum_of_its_shard(worlds: Worlds, world_size: int) -> None:
    worlds.adopt(parity_case("awkward", f"{SCENES}:Exchange", world_size, options={"scenario": "gradient_shards"}))


@pytest.mark.parametrize("placement", ["contiguous", "scattered"])
def test_two_levels_do_too(worlds: Worlds, placement: Placement) -> None:
    topology = Topology(num_nodes=2, ranks_per_node=2, placement=placement)
    options = {"scenario": "gradient_shards_in_two_levels"}
    worlds.adopt(parity_case("awkward", f"{SCENES}:Exchange", 4, options=options, topology=topology))


def test_ranks_are_those_of_the_group(worlds: Worlds) -> None:
    layout = Layout(data=4, shard=2)
    worlds.adopt(
        parity_case("awkward", f"{SCENES}:Exchange", 4, layout=layout, options={"scenario": "one_step_of_two_groups"})
    )
