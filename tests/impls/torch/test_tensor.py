"""What conformance does not show of torch.tensor: bytes on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from harness.case import Case
from harness.layout import Layout
from harness.measure import communication
from tests.impls.test_figures import predicted_bytes

if TYPE_CHECKING:
    from tests.conftest import Instrumented


@pytest.mark.parametrize(
    "workload",
    [
        "gpt:size=tiny,activation_checkpointing=true,clip_norm=0.5",
        "gpt:size=tiny,tied=true,global_batch_size=7,num_micro_batches=2",
        "llama:size=tiny",
    ],
)
def test_bytes_on_the_wire_are_foreseen(instrumented: Instrumented, workload: str) -> None:
    case = Case(workload=workload, implementation="torch.tensor", layout=Layout(tensor=2))
    launch = instrumented.adopt(case)
    launch.command("build")
    launch.command("time_steps", num_steps=2)
    answers = launch.command("measure_communication", num_steps=1)
    metrics = communication.summarise([answer["records"] for answer in answers])
    assert metrics["communication.bytes_per_step"] == predicted_bytes(case)
