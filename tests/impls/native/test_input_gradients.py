"""What comes back to the input of a model that is cut is what comes back in one process, looked at directly and not by
the weights that it would train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.layout import Layout
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

FILE = Path(__file__).with_name("input_gradients.py")


@pytest.mark.parametrize(
    ("name", "options", "layout"),
    [
        ("native.tensor", {}, Layout(tensor=2)),
        ("native.tensor", {"transport": "shared_memory", "direct_gradients": False}, Layout(tensor=2)),
        ("native.tensor", {"sequence_parallel": True}, Layout(tensor=2)),
        ("native.pipeline", {}, Layout(pipeline=2)),
        ("native.pipeline", {"schedule": "zero_bubble"}, Layout(pipeline=2)),
        ("native.pipeline", {"schedule": "interleaved_1f1b", "chunks": 2}, Layout(pipeline=2)),
        ("native.hybrid", {"stage": 3, "sequence_parallel": True}, Layout(data=2, tensor=2)),
        ("native.hybrid", {"schedule": "zero_bubble", "sequence_parallel": True}, Layout(tensor=2, pipeline=2)),
    ],
    ids=str,
)
def test_the_gradient_of_the_input_is_that_of_one_process(
    worlds: Worlds, name: str, options: dict[str, Any], layout: Layout
) -> None:
    given = {"of": name, "options": json.dumps(options)}
    case = parity_case(
        f"{FILE}:workload",
        f"{FILE}:InputGradients",
        layout.world_size,
        layout=layout,
        options=given,
        precision="fp64",
    )
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation
