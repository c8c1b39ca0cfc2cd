"""What conformance does not show of evaluation: other batches than the next one, and that training goes on with the
very bits it would have had: dropout's random numbers, BatchNorm's statistics, gradients, optimizer states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness.layout import Layout
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

EVALUATING = f"{Path(__file__).with_name('evaluating.py')}:Evaluating"


@pytest.mark.parametrize(
    ("kind", "name", "options", "layout"),
    [
        ("batch_norm", "reference", {"data_degree": 2}, Layout()),
        ("dropout", "native.ddp", {"transport": "shared_memory"}, Layout(data=2)),
        ("batch_norm", "native.ddp", {}, Layout(data=2)),
        ("synchronised_batch_norm", "native.zero", {"stage": 2}, Layout(data=2)),
        ("dropout", "native.zero", {"stage": 3}, Layout(data=2)),
        ("buffers", "native.zero", {"stage": 3, "transport": "shared_memory"}, Layout(data=2)),
        ("clipped", "native.tensor", {"sequence_parallel": True, "transport": "shared_memory"}, Layout(tensor=2)),
        ("dropout", "native.pipeline", {"schedule": "interleaved_1f1b", "chunks": 2}, Layout(pipeline=2)),
        ("dropout", "native.hybrid", {"stage": 1, "schedule": "zero_bubble"}, Layout(data=2, pipeline=2)),
        ("batch_norm", "torch.ddp", {}, Layout(data=2)),
        ("dropout", "torch.zero", {}, Layout(data=2)),
        ("buffers", "torch.fsdp", {"reshard_after_forward": False}, Layout(data=2)),
        ("sometimes_unused", "torch.fsdp", {}, Layout(data=2)),
        ("clipped", "torch.tensor", {}, Layout(tensor=2)),
        ("dropout", "torch.pipeline", {"schedule": "zero_bubble", "chunks": 2}, Layout(pipeline=2)),
        ("clipped", "torch.hybrid", {}, Layout(data=2, tensor=2)),
    ],
    ids=str,
)
def test_an_evaluation_is_right_and_leaves_no_trace(
    worlds: Worlds, kind: str, name: str, options: dict[str, Any], layout: Layout
) -> None:
    def case(implementation: str, given: dict[str, Any]) -> Any:
        size = layout.world_size
        return parity_case(f"awkward:kind={kind}", implementation, size, layout=layout, options=given, precision="fp64")

    plain = worlds.trajectory(case(name, options))
    evaluated = worlds.trajectory(case(EVALUATING, {"of": name, "options": json.dumps(options)}))
    assert evaluated.losses == plain.losses
    assert evaluated.evaluation_loss == plain.evaluation_loss
    assert evaluated.gradient_norms == plain.gradient_norms
    assert evaluated.replica_checksums == plain.replica_checksums
    for quantity in ("parameters", "buffers"):
        got, right = getattr(evaluated, quantity), getattr(plain, quantity)
        assert got.keys() == right.keys()
        assert all(torch.equal(got[each], right[each]) for each in right), quantity
