"""Models that do legal but unusual things train as they do in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

_MODELS = Path(__file__).with_name("odd_models.py")
_BUILDERS = ("cached", "counting", "shape_ordered", "saliency", "force", "vectorised", "hooked")


@pytest.mark.parametrize("options", [{"small_bytes": 0}, {"transport": "shared_memory", "small_bytes": 0}, {}], ids=str)
@pytest.mark.parametrize("builder", _BUILDERS)
def test_native_ddp_takes_them_as_they_are(worlds: Worlds, builder: str, options: dict[str, Any]) -> None:
    options = {"bucket_bytes": 100, **options}
    parity = worlds.parity(parity_case(f"{_MODELS}:{builder}", "native.ddp", 2, options=options, precision="fp64"))
    assert parity.ok, parity.explanation
