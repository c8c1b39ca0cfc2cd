"""The parity gate must fail every broken sharded optimizer, at the stages where the fault can happen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.layout import Layout
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

_MUTANTS = Path(__file__).with_name("zero_mutants.py")
_SMALL = {"bucket_bytes": 4000}
_UNREDUCED = "element by element, one rank's share alone: not reduced"
_FAULTS: list[tuple[str, str, dict[str, Any], Layout, str]] = [
    # mutant, awkward workload, options, layout, what the explanation says
    (
        "NoReduceScatter",
        "unequal_tokens",
        {"stage": 1},
        Layout(data=2),
        _UNREDUCED,
    ),
    (
        "NoReduceScatter",
        "unequal_tokens",
        {"stage": 2},
        Layout(data=2),
        _UNREDUCED,
    ),
    (
        "NoReduceScatter",
        "unequal_tokens",
        {"stage": 3},
        Layout(data=2),
        _UNREDUCED,
    ),
    ("PaddingInNorm", "clipped", {"stage": 2, **_SMALL}, Layout(data=3), "gradient norm"),
    ("PaddingInNorm", "clipped", {"stage": 3}, Layout(data=3), "gradient norm"),
    ("EverythingDecays", "decay_groups", {"stage": 1}, Layout(data=2), "weight decay is applied to every parameter"),
    ("EverythingDecays", "decay_groups", {"stage": 3}, Layout(data=2), "weight decay is applied to every parameter"),
    ("LastMicroBatchOnly", "unequal_tokens", {"stage": 2}, Layout(data=2), "holds the last micro-batch alone"),
    ("LastMicroBatchOnly", "unequal_tokens", {"stage": 3}, Layout(data=2), "holds the last micro-batch alone"),
    ("ReducedInTheFirst", "unequal_tokens", {"stage": 2}, Layout(data=2), "holds the first micro-batch alone"),
    ("MomentsShiftedByPadding", "unequal_tokens", {"stage": 1}, Layout(data=2), "parts at step"),
    ("MomentsShiftedByPadding", "clipped", {"stage": 3}, Layout(data=2), "parts at step"),
    ("NormOfOwnShard", "clipped", {"stage": 2}, Layout(data=2), "gradient norm"),
    ("StaleShards", "unequal_tokens", {"stage": 3}, Layout(data=2), "parts at step 2"),
    ("UnusedDecays", "unused", {"stage": 2}, Layout(data=2), "which the reference has not"),
    (
        "ReplicasApart",
        "unequal_tokens",
        {"stage": 2},
        Layout(data=4, shard=2),
        "ranks 2, 3 and rank 0 no longer hold the same",
    ),
]


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(
    ("mutant", "kind", "options", "layout", "explanation"),
    _FAULTS,
    ids=[f"{fault[0]}-{fault[2]['stage']}" for fault in _FAULTS],
)
def test_gate_catches_and_explains(
    worlds: Worlds,
    mutant: str,
    kind: str,
    options: dict[str, Any],
    layout: Layout,
    explanation: str,
    precision: str,
) -> None:
    case = parity_case(
        f"awkward:kind={kind}",
        f"{_MUTANTS}:{mutant}",
        layout.world_size,
        layout=layout,
        options=options,
        precision=precision,
    )
    parity = worlds.parity(case)
    assert not parity.ok
    assert parity.first_bad_step is not None
    assert parity.explanation is not None
    assert explanation in parity.explanation
