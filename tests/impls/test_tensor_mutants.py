"""The parity gate must fail every broken tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.layout import Layout
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

_MUTANTS = Path(__file__).with_name("tensor_mutants.py")


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(
    ("mutant", "kind", "options"),
    [
        ("BiasAddedByAll", "unequal_tokens", {}),
        ("NoSumOnEntering", "unequal_tokens", {}),
        ("AlikeCountedByAll", "clipped", {}),
        ("PartialNotSummed", "gqa", {}),
        ("PartialNotSummed", "unequal_tokens", {"sequence_parallel": True}),
        ("FusedCutAcrossParts", "unequal_tokens", {}),
    ],
)
def test_gate_catches(worlds: Worlds, mutant: str, kind: str, options: dict[str, Any], precision: str) -> None:
    case = parity_case(
        f"awkward:kind={kind}",
        f"{_MUTANTS}:{mutant}",
        2,
        layout=Layout(tensor=2),
        options=options,
        precision=precision,
    )
    parity = worlds.parity(case)
    assert not parity.ok
    assert parity.first_bad_step is not None
