"""All ways to gather parameters, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

SCENES = Path(__file__).parent / "exchange_scenes.py"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ways_gather_what_the_owners_have(worlds: Worlds, world_size: int) -> None:
    worlds.adopt(parity_case("awkward", f"{SCENES}:Exchange", world_size, options={"scenario": "parameter_gathers"}))
