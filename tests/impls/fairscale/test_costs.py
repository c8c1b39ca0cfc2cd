"""What FairScale's implementations hold and send, measured and held against their closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import implementation
from harness.case import Case
from harness.layout import Layout
from harness.measure import communication, memory
from harness.measure.memory import MemoryReport
from harness.measure.predicted_memory import predicted, registry
from impls.fairscale.parts.fully_sharded_costs import memory_bytes, sent_bytes
from tests.conftest import Instrumented
from tests.impls.test_figures import GPT, predicted_bytes, work_of

pytestmark = [pytest.mark.baselines, pytest.mark.usefixtures("fairscale")]


SCENES = Path(__file__).with_name("fsdp_scenes.py")


def make_case(name: str, layout: Layout, workload: str, precision: str, options: dict[str, Any]) -> Case:
    return Case(workload=workload, implementation=name, layout=layout, options=options, precision=precision)


@pytest.mark.parametrize(
    ("name", "layout", "workload", "precision", "options"),
    [
        ("fairscale.oss", Layout(data=2), "awkward:kind=unused", "bf16", {}),
        ("fairscale.oss", Layout(data=4), "awkward:kind=few_micro_batches", "fp32", {}),
        ("fairscale.oss", Layout(data=2), "awkward:kind=buffers", "fp64", {}),
        ("fairscale.sharded_ddp", Layout(data=2), "awkward:kind=few_micro_batches", "fp32", {}),
        ("fairscale.sharded_ddp", Layout(data=2), GPT, "fp64", {"reduce_buffer_size": 500}),
        ("fairscale.sharded_ddp", Layout(data=4), GPT, "fp32", {"reduce_buffer_size": 500}),
        ("fairscale.sharded_ddp", Layout(data=4), "awkward:kind=frozen", "fp32", {"reduce_buffer_size": 0}),
        (
            "fairscale.sharded_ddp",
            Layout(data=2),
            "gpt:size=tiny,global_batch_size=4",
            "fp32",
            {"reduce_buffer_size": 500},
        ),
        ("fairscale.sharded_ddp", Layout(data=4), "awkward:kind=buffers", "fp32", {}),
        ("fairscale.tensor", Layout(tensor=2), GPT, "fp64", {}),
        ("fairscale.tensor", Layout(tensor=4), "gpt:size=tiny,global_batch_size=4,clip_norm=1.0", "fp32", {}),
        ("fairscale.tensor", Layout(tensor=2), "awkward:kind=tied", "bf16", {}),
        ("fairscale.tensor", Layout(tensor=2), "awkward:kind=gqa", "fp32", {}),
    ],
    ids=str,
)
def test_bytes_sent_and_held_are_the_closed_form(
    instrumented: Instrumented, name: str, layout: Layout, workload: str, precision: str, options: dict[str, Any]
) -> None:
    """DDP cuts its gradients into buckets, each rounded up to whole bytes. AdamW keeps a step counter of four bytes a
    parameter beside the moments. Gradients of earlier micro-batches lie where no list of them is taken."""
    case = make_case(name, layout, workload, precision, options)
    work = work_of(case)
    launch = instrumented.adopt(case)
    reports: list[MemoryReport] = launch.command("build_and_measure_memory", num_steps=1)
    answers = launch.command("measure_communication", num_steps=1)

    sent = communication.summarise([answer["records"] for answer in answers])["communication.bytes_per_step"]
    assert 0 <= sent - predicted_bytes(case) < (3 if name == "fairscale.oss" else 1)

    states = implementation.load(name).predicted_memory(work, registry(work), layout, options)
    assert states is not None
    largest = {kind: max(report.largest_bytes[kind] for report in reports) for kind in states}
    assert largest["parameters"] == states["parameters"]
    counters = largest["optimizer_states"] - states["optimizer_states"]
    assert counters % 4 == 0
    assert 0 <= counters <= 4 * len(registry(work))
    if work.training.num_micro_batches == 1 or name == "fairscale.tensor":
        assert largest["gradients"] == states["gradients"]


@pytest.mark.parametrize(
    ("ranks", "workload", "options"),
    [
        (2, "gpt:size=tiny,global_batch_size=4,clip_norm=1.0", {}),
        (3, "awkward:kind=few_micro_batches", {"reshard_after_forward": False}),
        (2, "awkward:kind=buffers", {}),
    ],
    ids=str,
)
def test_fully_sharded_sends_and_holds_the_closed_form_where_its_streams_are_taken_out(
    instrumented: Instrumented, ranks: int, workload: str, options: dict[str, Any]
) -> None:
    """FairScale's own code over gloo, whose reduce-scatter is an all-reduce, in the steady state."""
    case = make_case(f"{SCENES}:WithoutStreams", Layout(data=ranks), workload, "fp32", options)
    work = work_of(case)
    launch = instrumented.adopt(case)
    reports: list[MemoryReport] = launch.command("build_and_measure_memory", num_steps=1)
    answers = launch.command("measure_communication", num_steps=1)
    sent = communication.summarise([answer["records"] for answer in answers])["communication.bytes_per_step"]
    reshards = options.get("reshard_after_forward", True)
    assert sent == sent_bytes(work, registry(work), case.layout, reshards=reshards, algorithm="gloo")
    for category, num_bytes in memory_bytes(work, registry(work), ranks).items():
        counters = max(report.largest_bytes[category] for report in reports) - num_bytes
        assert 0 <= counters <= (4 * len(registry(work)) if category == "optimizer_states" else 0), category


BROAD = "gpt:size=tiny,vocabulary_size=4096,global_batch_size=4"


@pytest.mark.parametrize(
    ("name", "layout", "workload", "precision", "options"),
    [
        ("fairscale.tensor", Layout(tensor=2), BROAD, "fp32", {}),
        ("fairscale.tensor", Layout(tensor=4), BROAD, "bf16", {}),
        ("fairscale.tensor", Layout(tensor=2), f"{BROAD},num_micro_batches=2", "fp32", {}),
        ("fairscale.pipe", Layout(), BROAD, "fp32", {}),
        ("fairscale.pipe", Layout(), BROAD, "fp32", {"chunks": 1, "num_partitions": 3}),
    ],
    ids=str,
)
def test_the_peak_is_the_plan(
    instrumented: Instrumented, name: str, layout: Layout, workload: str, precision: str, options: dict[str, Any]
) -> None:
    case = make_case(name, layout, workload, precision, options)
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    measured = memory.combine(reports)
    foreseen = predicted(work_of(case), implementation.load(name), layout, options)
    peak = measured["memory.peak_allocated_bytes.max_rank"]
    assert peak == pytest.approx(foreseen["memory.predicted_peak_bytes"], rel=0.03)
    activations = measured["memory.activation_bytes"]
    assert activations == pytest.approx(foreseen["memory.predicted_activation_bytes"], rel=0.03)
