from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from impls.native.parts.synchronised_batch_norm import summed_bytes
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

PROBES = Path(__file__).parents[1] / "probes.py"


@pytest.mark.parametrize("world_size", [2, 3])
def test_unlike_and_empty_shares_equal_one_batch_norm_over_their_union(worlds: Worlds, world_size: int) -> None:
    options = {"scenario": "synchronised_batch_norm"}
    worlds.adopt(parity_case("awkward", f"{PROBES}:Probe", world_size, options=options))


def test_sums_are_two_a_channel_and_a_count_there_and_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm2d(5))
    assert summed_bytes(model, torch.float64) == 8 * (2 * 7 + 2 * 11)
    assert summed_bytes(model, torch.bfloat16) == summed_bytes(model, torch.float32) == 4 * (2 * 7 + 2 * 11)
