"""What conformance does not show of torch.hybrid: few samples for many replicas, bytes on the wire, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import models
from harness.case import Case
from harness.implementation import load
from harness.layout import Layout
from harness.measure import communication
from harness.measure.memory import MemoryReport
from harness.measure.predicted_memory import registry
from harness.models import with_options
from tests.conftest import parity_case
from tests.impls.test_figures import Instrumented, predicted_bytes, work_of

if TYPE_CHECKING:
    from tests.conftest import Worlds

REPLICAS = Layout(data=2, pipeline=2)


@pytest.mark.parametrize("options", [{}, {"schedule": "zero_bubble"}], ids=str)
def test_a_replica_without_samples_adds_nothing(worlds: Worlds, options: dict[str, Any]) -> None:
    """Micro-batches of one sample, of which the first replica has none; the embedding is tied to the head."""
    text = "gpt:size=tiny,tied=true,num_micro_batches=4,global_batch_size=4,clip_norm=0.5"
    parity = worlds.parity(parity_case(text, "torch.hybrid", 4, layout=REPLICAS, options=options, precision="fp64"))
    assert parity.ok, parity.explanation
    assert parity.replicas_bit_equal


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instrumented]:
    ranks = Instrumented(tmp_path_factory.mktemp("instrumented"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("num_micro_batches", [2, 4])
def test_gradients_are_summed_once_a_step_however_many_micro_batches(
    instrumented: Instrumented, num_micro_batches: int
) -> None:
    case = Case(
        workload=with_options("gpt:size=tiny,tied=true,clip_norm=0.5", num_micro_batches=num_micro_batches),
        implementation="torch.hybrid",
        layout=REPLICAS,
    )
    launch = instrumented.adopt(case)
    launch.command("build")
    launch.command("time_steps", num_steps=2)
    answers = launch.command("measure_communication", num_steps=1)
    metrics = communication.summarise([answer["records"] for answer in answers])
    assert metrics["communication.calls.all_reduce"] == 2  # over the replicas, and between embedding and head
    assert metrics["communication.bytes_per_step"] == predicted_bytes(case)


@pytest.mark.parametrize(
    "workload",
    [
        "gpt:size=tiny,activation_checkpointing=true,clip_norm=0.5",
        "gpt:size=tiny,tied=true,global_batch_size=7,num_micro_batches=2",
        "llama:size=tiny",
    ],
)
def test_bytes_and_states_of_shards_of_slices_are_foreseen(instrumented: Instrumented, workload: str) -> None:
    case = Case(workload=workload, implementation="torch.hybrid", layout=Layout(data=2, tensor=2))
    launch = instrumented.adopt(case)
    launch.command("build")
    launch.command("time_steps", num_steps=2)
    answers = launch.command("measure_communication", num_steps=1)
    metrics = communication.summarise([answer["records"] for answer in answers])
    assert metrics["communication.bytes_per_step"] == predicted_bytes(case)
    work = work_of(case)
    foreseen = load(case.implementation).predicted_memory(work, registry(work), case.layout, case.options)
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    assert foreseen is not None
    assert max(report.largest_bytes["parameters"] for report in reports) == foreseen["parameters"]
    # torch keeps a counter of four bytes for each parameter.
    states = max(report.largest_bytes["optimizer_states"] for report in reports)
    assert states == foreseen["optimizer_states"] + 4 * len(registry(work))


@pytest.mark.parametrize(
    ("workload", "layout", "message"),
    [
        (
            "gpt",
            Layout(data=4, shard=2, pipeline=2),
            "replicas of a pipeline shard nothing along the data axis, got data=4 shard=2 pipeline=2",
        ),
        (
            "gpt",
            Layout(tensor=2, pipeline=2),
            "torch.hybrid takes a data degree with a tensor or a pipeline degree, got",
        ),
        ("gpt", Layout(data=4, shard=2, tensor=2), "fully_shard over slices shards over the whole data axis, got"),
        ("gpt", Layout(data=2, tensor=3), "tensor=3 does not divide block0.attention.query_key_value: 96 output"),
        ("gpt:num_micro_batches=2", Layout(data=3, pipeline=2), "torch's stages take micro-batches of one shape"),
        ("awkward:kind=batch_norm", REPLICAS, "statistics of batches would have to be those of the first replica"),
        ("awkward:kind=sometimes_unused", REPLICAS, "a parameter that some ranks leave unused would put the sums"),
        ("gpt:num_micro_batches=1", REPLICAS, "torch's 1F1B takes as many micro-batches as stages, got 1 for 2"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused_before_any_process_starts(workload: str, layout: Layout, message: str) -> None:
    reason = load("torch.hybrid").unsupported(models.load(workload), layout, torch.device("cpu"), {})
    assert reason is not None
    assert reason.startswith(message), reason
