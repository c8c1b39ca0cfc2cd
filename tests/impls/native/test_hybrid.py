"""What conformance does not show of native.hybrid: all three axes at once, layers that put gradients off, and what it
refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import models
from harness.case import Case
from harness.implementation import load
from harness.layout import Layout
from harness.measure import communication, memory
from harness.measure.memory import MemoryReport
from harness.measure.predicted_memory import predicted, registry
from tests.conftest import parity_case
from tests.impls.test_figures import Instrumented, predicted_bytes, work_of

if TYPE_CHECKING:
    from tests.conftest import Worlds

CUBE = Layout(data=2, tensor=2, pipeline=2)
GPT = "gpt:size=tiny,tied=true,num_micro_batches=4,clip_norm=0.5"


def check(worlds: Worlds, workload: str, layout: Layout, options: dict[str, Any]) -> None:
    case = parity_case(workload, "native.hybrid", layout.world_size, layout=layout, options=options, precision="fp64")
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation
    assert parity.replicas_bit_equal


@pytest.mark.parametrize(
    "options", [{}, {"stage": 1, "sequence_parallel": True, "schedule": "zero_bubble", "transport": "shared_memory"}]
)
def test_all_axes_at_once(worlds: Worlds, options: dict[str, Any]) -> None:
    check(worlds, f"{GPT},activation_checkpointing=true", CUBE, options)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_layers_that_put_gradients_off_keep_no_bucket_waiting(worlds: Worlds, stage: int) -> None:
    """The projections of a region leave their weights' gradients to its entrance, and are in buckets of their own."""
    options = {"stage": stage, "bucket_bytes": 1}
    check(worlds, "llama:size=tiny,num_micro_batches=2", Layout(data=2, tensor=2), options)


def test_dropout_is_that_of_one_process(worlds: Worlds) -> None:
    text = "gpt:size=tiny,dropout=0.2,attention_dropout=0.0,num_micro_batches=3,activation_checkpointing=true"
    check(worlds, text, CUBE, {"schedule": "zero_bubble"})


def test_shards_within_groups_of_slices(worlds: Worlds) -> None:
    check(worlds, GPT, Layout(data=4, shard=2, tensor=2), {"stage": 2})


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp32_gradients"])
def test_low_precision_stays_within_its_envelope(worlds: Worlds, precision: str) -> None:
    layout = Layout(data=2, tensor=2)
    text = "awkward:kind=clipped"
    case = parity_case(text, "native.hybrid", 4, layout=layout, options={"stage": 1}, precision=precision)
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instrumented]:
    ranks = Instrumented(tmp_path_factory.mktemp("instrumented"))
    yield ranks
    ranks.close()


RECIPES = {
    "uneven": "global_batch_size=7,num_micro_batches=2",
    "checkpointed": "clip_norm=0.5,activation_checkpointing=true",
    "tied": "num_micro_batches=4,tied=true,clip_norm=0.5",
    "large": "num_micro_batches=3,vocabulary_size=4096,activation_checkpointing=true",
}


@pytest.mark.parametrize("recipe", ["uneven", "checkpointed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stage": 1, "sequence_parallel": True},
        {"stage": 2, "transport": "shared_memory"},
        {"stage": 3},
        {"stage": 3, "sequence_parallel": True, "transport": "shared_memory"},
    ],
    ids=str,
)
def test_bytes_and_states_are_the_closed_forms(
    instrumented: Instrumented, options: dict[str, Any], recipe: str
) -> None:
    """Of each axis, over the slices of the other."""
    case = make_case(Layout(data=2, tensor=2), recipe, options)
    check_bytes(instrumented, case)
    check_states(case, measured_memory(instrumented, case))


@pytest.mark.parametrize(
    ("axes", "recipe", "options", "tolerance"),
    [
        ({"data": 2}, "uneven", {}, 0.002),
        ({"data": 2}, "tied", {"stage": 1, "schedule": "zero_bubble"}, 0.002),
        ({"tensor": 2}, "large", {"transport": "shared_memory", "schedule": "gpipe"}, 0.002),
        # Over the process group gloo's own thread lets go of what it has summed some time after.
        ({"tensor": 2}, "tied", {"schedule": "interleaved_1f1b", "chunks": 2, "sequence_parallel": True}, 0.15),
    ],
    ids=str,
)
def test_a_pipeline_of_slices_or_replicas_is_foreseen(
    instrumented: Instrumented, axes: dict[str, int], recipe: str, options: dict[str, Any], tolerance: float
) -> None:
    case = make_case(Layout(pipeline=2, **axes), recipe, options)
    check_bytes(instrumented, case)
    reports = measured_memory(instrumented, case)
    check_states(case, reports)
    foreseen = predicted(work_of(case), load(case.implementation), case.layout, case.options)
    figures = memory.combine(reports)
    peak = figures["memory.peak_allocated_bytes.max_rank"]
    assert foreseen["memory.predicted_peak_bytes"] == pytest.approx(peak, rel=tolerance)
    assert foreseen["memory.predicted_peak_bytes"] < peak
    activations = foreseen["memory.predicted_activation_bytes"]
    assert activations == pytest.approx(figures["memory.activation_bytes"], rel=tolerance)


def make_case(layout: Layout, recipe: str, options: dict[str, Any]) -> Case:
    workload = f"gpt:size=tiny,{RECIPES[recipe]}"
    return Case(workload=workload, implementation="native.hybrid", layout=layout, options=options)


def check_bytes(instrumented: Instrumented, case: Case) -> None:
    """Of the rank that sends most, in the steady state."""
    launch = instrumented.adopt(case)
    launch.command("build")
    launch.command("time_steps", num_steps=2)
    answers = launch.command("measure_communication", num_steps=1)
    sent = communication.summarise([answer["records"] for answer in answers])["communication.bytes_per_step"]
    assert sent == predicted_bytes(case)


def measured_memory(instrumented: Instrumented, case: Case) -> list[MemoryReport]:
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    return reports


def check_states(case: Case, reports: list[MemoryReport]) -> None:
    workload = work_of(case)
    foreseen = load(case.implementation).predicted_memory(workload, registry(workload), case.layout, case.options)
    assert foreseen is not None
    for category in ("parameters", "optimizer_states"):
        largest = max(report.largest_bytes[category] for report in reports)
        assert largest - foreseen[category] in range(2048), category  # counters of steps


@pytest.mark.parametrize(
    ("workload", "layout", "options", "message"),
    [
        (GPT, CUBE, {"stage": 2}, "in a pipeline stage 2 would exchange what it shards for every micro-batch"),
        (GPT, Layout(data=2, shard=2, tensor=2), {}, "stage 0 shards nothing along the data axis, got data=2 shard=2"),
        ("convnet", Layout(data=2, tensor=2), {}, "workload convnet has no tensor plan"),
        ("convnet", Layout(data=2, pipeline=2), {}, "workload convnet has no chain"),
        (GPT, Layout(tensor=2, pipeline=8), {}, "8 stages need as many blocks, got the 4 of gpt"),
    ],
    ids=str,
)
def test_what_cannot_be_put_together_is_refused_before_any_process_starts(
    workload: str, layout: Layout, options: dict[str, Any], message: str
) -> None:
    reason = load("native.hybrid").unsupported(models.load(workload), layout, torch.device("cpu"), options)
    assert reason is not None
    assert reason.startswith(message), reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage must be one of 0, 1, 2, 3, got 4"),
        (
            {"schedule": "dfs"},
            "schedule must be one of gpipe, 1f1b, interleaved_1f1b, zero_bubble, zero_bubble_h2, got 'dfs'",
        ),
        ({"stage": 2, "reshard_after_forward": False}, "reshard_after_forward is for stage 3, .* got stage 2"),
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
    ],
    ids=str,
)
def test_options_without_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    refused = load("native.hybrid").refused_options(options)
    assert refused is not None
    assert re.search(message, refused), refused
