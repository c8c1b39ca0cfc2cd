from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

PROBES = Path(__file__).parents[1] / "probes.py"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_ends_with_the_first_ones_buffers(worlds: Worlds, world_size: int) -> None:
    worlds.adopt(parity_case("awkward", f"{PROBES}:Probe", world_size, options={"scenario": "buffer_broadcasts"}))
