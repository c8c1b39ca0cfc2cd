"""Exchanges of activations and the cut vocabulary, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

SCENES = Path(__file__).parent / "tensor_scenes.py"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("scenario", ["exchanges", "vocabulary"])
def test_ranks_have_together_what_one_process_has(worlds: Worlds, world_size: int, scenario: str) -> None:
    worlds.adopt(parity_case("awkward", f"{SCENES}:Tensors", world_size, options={"scenario": scenario}))


def test_a_rank_that_does_not_come_is_named(worlds: Worlds) -> None:
    worlds.adopt(parity_case("awkward", f"{SCENES}:Tensors", 2, options={"scenario": "one_that_does_not_come"}))
