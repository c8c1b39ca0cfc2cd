"""The parity gate must fail every broken product of degrees, and pass the whole one on the same work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.layout import Layout
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

_MUTANTS = Path(__file__).with_name("hybrid_mutants.py")
_TIED = "awkward:kind=tied,num_micro_batches=2,clip_norm=0.1,optimizer=sgd,learning_rate=0.1"
_STAGES, _SLICES = Layout(data=2, pipeline=2), Layout(data=2, tensor=2)


@pytest.mark.parametrize(
    ("implementation", "layout", "options", "first_bad_step"),
    [
        ("native.hybrid", _STAGES, {"stage": 1}, None),
        ("native.hybrid", _SLICES, {"stage": 2, "sequence_parallel": True}, None),
        (f"{_MUTANTS}:PartialSummedTooLate", _STAGES, {"stage": 1}, 0),
        (f"{_MUTANTS}:PartialSummedTooLate", _SLICES, {"stage": 2, "sequence_parallel": True}, 0),
        (f"{_MUTANTS}:NormOfOneSlice", _STAGES, {"stage": 1}, 0),
        (f"{_MUTANTS}:NormOfOneShard", _SLICES, {"stage": 1}, 0),
    ],
    ids=lambda value: Path(value).name if isinstance(value, str) else "",
)
def test_gate_catches(
    worlds: Worlds, implementation: str, layout: Layout, options: dict[str, Any], first_bad_step: int | None
) -> None:
    parity = worlds.parity(parity_case(_TIED, implementation, 4, layout=layout, options=options, precision="fp64"))
    assert parity.ok == (first_bad_step is None), parity
    assert parity.first_bad_step == first_bad_step
