"""The parity gate must fail every broken pipeline, and pass the whole one on the same work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.layout import Layout
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

_MUTANTS = Path(__file__).with_name("pipeline_mutants.py")
_CHAINS = Path(__file__).parent / "native" / "chains.py"
_TIED = "awkward:kind=tied,num_micro_batches=4,clip_norm=0.1,optimizer=sgd,learning_rate=0.1"
_LARGE = f"{_CHAINS}:even:num_blocks=3,width=192,length=4,num_micro_batches=4"
_ZERO_BUBBLE = {"schedule": "zero_bubble"}


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(
    ("implementation", "workload", "options", "first_bad_step"),
    [
        ("native.pipeline", _TIED, {}, None),
        ("native.pipeline", _LARGE, _ZERO_BUBBLE, None),
        (f"{_MUTANTS}:ClippedByStage", _TIED, {}, 1),
        (f"{_MUTANTS}:LabelsOfAnother", _TIED, {}, 0),
        (f"{_MUTANTS}:DividedAgain", _TIED, {}, 1),
        (f"{_MUTANTS}:TiesNotSummed", _TIED, {}, 0),
        (f"{_MUTANTS}:TiesCountedTwice", _TIED, {}, 0),
        (f"{_MUTANTS}:LastBackwardDropped", _TIED, {}, 0),
        (f"{_MUTANTS}:WeightsDropped", _LARGE, _ZERO_BUBBLE, 0),
    ],
    ids=lambda value: Path(value).name if isinstance(value, str) else "",
)
def test_gate_catches(
    worlds: Worlds,
    implementation: str,
    workload: str,
    options: dict[str, Any],
    first_bad_step: int | None,
    precision: str,
) -> None:
    case = parity_case(workload, implementation, 2, layout=Layout(pipeline=2), options=options, precision=precision)
    parity = worlds.parity(case)
    assert parity.ok == (first_bad_step is None), parity
    assert parity.first_bad_step == first_bad_step
