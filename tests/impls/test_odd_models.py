"""Models that do legal but unusual things train as they do in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

_MODELS = Path(__file__).with_name("odd_models.py")
_BUILDERS = ("cached", "counting", "shape_ordered", "saliency", "force", "vectorised", "hooked")


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
@pytest.mark.parametrize("builder", _BUILDERS)
def test_native_ddp_takes_them_as_they_are(worlds: Worlds, builder: str, transport: str) -> None:
    options = {"transport": transport, "bucket_bytes": 100}
    parity = worlds.parity(parity_case(f"{_MODELS}:{builder}", "native.ddp", 2, options=options, precision="fp64"))
    assert parity.ok, parity.explanation
