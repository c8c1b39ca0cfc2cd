from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import models
from harness.layout import Layout
from harness.measure import communication, memory
from harness.measure.memory import MemoryReport
from harness.measure.predicted_memory import predicted, registry
from harness.workload import in_precision
from impls.deepspeed.parts.pipeline_dry_run import actions
from impls.deepspeed.parts.pipeline_stages import plan
from impls.deepspeed.pipeline import DeepSpeedPipeline
from tests.conftest import Instrumented, parity_case
from tests.impls.test_conformance import skip_unless_available
from tests.impls.test_figures import make_case, work_of

if TYPE_CHECKING:
    from tests.conftest import Worlds

NAME = "deepspeed.pipeline"


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instrumented]:
    ranks = Instrumented(tmp_path_factory.mktemp("instrumented"))
    yield ranks
    ranks.close()


def test_a_tie_is_known_by_the_stages_that_hold_it() -> None:
    planned = plan(models.load("awkward:kind=tied"), 2, "uniform")
    assert planned.tied == {"embedding.token.weight": [0, 1]}
    assert planned.shapes == ((4, 8),)


@pytest.mark.parametrize(
    ("kind", "precision", "layout", "options", "words"),
    [
        ("sgd", "fp32", Layout(data=2, pipeline=2), {}, "takes a pipeline degree alone"),
        ("sgd", "fp64", Layout(pipeline=2), {}, "reduces no fp64 gradients"),
        ("clipped", "fp32", Layout(pipeline=2), {}, "it needs stage=1"),
        ("sgd", "bf16", Layout(pipeline=2), {}, "masters in stage 1, got stage 0 in bf16"),
        ("uneven_samples", "fp32", Layout(pipeline=2), {}, "micro-batches of one shape, got (2, 8) and (3, 8)"),
        (
            "tied",
            "fp32",
            Layout(pipeline=4),
            {"stage": 1, "partition": "uniform"},
            "as many decay groups, got 1, 2, 2, 2",
        ),
        ("gqa", "fp32", Layout(pipeline=8), {"stage": 1}, "8 stages need as many blocks"),
    ],
)
def test_what_it_cannot_train_is_told_before_anything_starts(
    kind: str, precision: str, layout: Layout, options: dict[str, Any], words: str
) -> None:
    workload = in_precision(models.load(f"awkward:kind={kind}"), precision)
    reason = DeepSpeedPipeline.unsupported(workload, layout, torch.device("cpu"), options)
    assert reason is not None
    assert words in reason


def test_zero_stops_at_stage_one() -> None:
    assert DeepSpeedPipeline.refused_options({"stage": 2}) == "stage must be 0 or 1 in a pipeline, got 2"


@pytest.mark.baselines
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("world_size", "workload", "precision", "options"),
    [
        (2, "awkward:kind=tied", "fp32", {"stage": 1}),
        (4, "awkward:kind=sgd", "fp32", {}),
        (3, "awkward:kind=dropout", "fp32", {"partition": "parameters"}),
        (2, "awkward:kind=clipped", "bf16", {"stage": 1}),
    ],
    ids=str,
)
def test_trains_what_one_process_trains(
    worlds: Worlds, world_size: int, workload: str, precision: str, options: dict[str, Any]
) -> None:
    skip_unless_available(NAME)
    layout = Layout(pipeline=world_size)
    case = parity_case(workload, NAME, world_size, layout=layout, options=options, precision=precision)
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation


@pytest.mark.baselines
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("world_size", "kind", "options"),
    [(2, "tied", {"stage": 1}), (4, "biases", {}), (4, "few_micro_batches", {})],
    ids=str,
)
def test_bytes_sent_and_held_are_the_closed_form(
    instrumented: Instrumented, world_size: int, kind: str, options: dict[str, Any]
) -> None:
    skip_unless_available(NAME)
    case = make_case(NAME, world_size, f"awkward:kind={kind}", **options)
    case = replace(case, layout=Layout(pipeline=world_size))
    launch = instrumented.adopt(case)
    reports: list[MemoryReport] = launch.command("build_and_measure_memory", num_steps=1)
    answers = launch.command("measure_communication", num_steps=1)
    sent = communication.summarise([answer["records"] for answer in answers])
    work = work_of(case)
    assert sent["communication.bytes_per_step"] == DeepSpeedPipeline.predicted_wire_bytes(
        work, registry(work), case.layout, options
    )
    states = DeepSpeedPipeline.predicted_memory(work, registry(work), case.layout, options)
    assert states is not None
    held = {name: max(report.largest_bytes[name] for report in reports) for name in states}
    assert held["parameters"] == states["parameters"]
    borders = sum(shape.num_bytes for border in plan(work, world_size, "flops").outputs for shape in border)
    assert 0 <= held["gradients"] - states["gradients"] <= borders  # activations have some, too
    assert held["communication_buffers"] == states["communication_buffers"]
    assert max(report.peak_allocated_bytes for report in reports) < 4 * sum(states.values())  # no bucket of 2 GB


def test_forwards_and_backwards_alternate_once_the_pipeline_is_full() -> None:
    def line(rank: int) -> str:
        return " ".join(f"{kind}{index}" for kind, index in actions(rank, 3, 4))

    assert line(0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert line(1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert line(2) == "F0 B0 F1 B1 F2 B2 F3 B3"


@pytest.mark.baselines
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 1), (2, 4), (3, 2), (4, 8)])
def test_the_order_is_that_of_deepspeeds_schedule(num_stages: int, num_micro_batches: int) -> None:
    skip_unless_available(NAME)
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    for rank in range(num_stages):
        schedule = TrainSchedule(num_micro_batches, num_stages, rank)
        kinds = {ForwardPass: "F", BackwardPass: "B"}
        theirs = [
            (kinds[type(instruction)], instruction.buffer_id)
            for step in schedule.steps()
            for instruction in step
            if type(instruction) in kinds
        ]
        num_slots = schedule.num_pipe_buffers()
        assert theirs == [(kind, index % num_slots) for kind, index in actions(rank, num_stages, num_micro_batches)]


@pytest.mark.baselines
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("world_size", "workload", "precision", "options"),
    [
        (2, "gpt:size=tiny,vocabulary_size=4096,global_batch_size=4,num_micro_batches=4", "fp32", {}),
        (4, "gpt:size=tiny,vocabulary_size=4096,global_batch_size=8,num_micro_batches=8", "fp32", {}),
        (2, "gpt:size=tiny,vocabulary_size=4096,global_batch_size=4,num_micro_batches=2", "bf16", {"stage": 1}),
    ],
    ids=str,
)
def test_the_peak_is_the_plan(
    instrumented: Instrumented, world_size: int, workload: str, precision: str, options: dict[str, Any]
) -> None:
    skip_unless_available(NAME)
    case = replace(make_case(NAME, world_size, workload, precision, **options), layout=Layout(pipeline=world_size))
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    measured = memory.combine(reports)
    foreseen = predicted(work_of(case), DeepSpeedPipeline, case.layout, options)
    for figure in ("memory.activation_bytes", "memory.peak_allocated_bytes.max_rank"):
        plan_of = {"memory.activation_bytes": "activation"}.get(figure, "peak")
        assert measured[figure] == pytest.approx(foreseen[f"memory.predicted_{plan_of}_bytes"], rel=0.03), figure
