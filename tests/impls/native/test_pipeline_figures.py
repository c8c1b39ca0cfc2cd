"""What native.pipeline costs and waits for, measured by the instruments and held against closed forms and theory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.case import Case
from harness.implementation import load
from harness.layout import Layout
from harness.measure import communication, memory, pipeline
from harness.measure.memory import MemoryReport
from harness.measure.pipeline import PipelineFigures
from harness.measure.predicted_memory import predicted, registry
from harness.pipeline_marks import PredictedPipeline
from tests.conftest import Instrumented
from tests.impls.test_figures import predicted_bytes, work_of

CHAINS = Path(__file__).with_name("chains.py")
GPT = "gpt:size=tiny,num_micro_batches=4"
INTERLEAVED = {"schedule": "interleaved_1f1b", "chunks": 2}
SCHEDULES: list[dict[str, Any]] = [{"schedule": "gpipe"}, {}, INTERLEAVED, {"schedule": "zero_bubble"}]
NORM_BYTES = 8


def make_case(num_ranks: int, workload: str = GPT, precision: str = "fp32", **options: Any) -> Case:
    return Case(
        workload=workload,
        implementation="native.pipeline",
        layout=Layout(pipeline=num_ranks),
        options=options,
        precision=precision,
    )


def sent_bytes(instrumented: Instrumented, case: Case) -> float:
    """Of the rank that sends most, in one step."""
    launch = instrumented.adopt(case)
    launch.command("build")
    answers = launch.command("measure_communication", num_steps=1)
    return communication.summarise([answer["records"] for answer in answers])["communication.bytes_per_step"]


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_bytes_are_one_activation_a_border_each_way(instrumented: Instrumented, options: dict[str, Any]) -> None:
    case = make_case(2, **options)
    one = work_of(case).batch(0).micro_batches[0].inputs.numel() * 32 * 4
    # With stages 0 and 2 the first rank sends two activations on and one gradient back.
    expected = 4 * (3 if options == INTERLEAVED else 1) * one
    assert sent_bytes(instrumented, case) == predicted_bytes(case) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_fp32_gradients"])
def test_bytes_of_ties_and_of_the_norm(instrumented: Instrumented, precision: str) -> None:
    case = make_case(3, f"{GPT},tied=true,clip_norm=1.0", precision)
    compute, gradient = {"fp32": (4, 4), "bf16": (2, 2), "bf16_fp32_gradients": (2, 4)}[precision]
    one = work_of(case).batch(0).micro_batches[0].inputs.numel() * 32
    # The middle rank sends both ways, the outer ones sum what they make of the embedding: 2(2-1)/2 of its gradient.
    middle, outer = 4 * 2 * one * compute, 4 * one * compute + 256 * 32 * gradient
    assert predicted_bytes(case) == max(middle, outer) + 2 * NORM_BYTES
    assert sent_bytes(instrumented, case) == predicted_bytes(case)


def test_bytes_of_ties_between_several_stages(instrumented: Instrumented) -> None:
    """Each is summed by those that hold it: of three ranks the first two have one, the first and the last the other."""
    case = make_case(3, f"{CHAINS}:crossing_ties", partition="uniform")
    assert sent_bytes(instrumented, case) == predicted_bytes(case)


def test_what_carries_no_gradient_is_sent_forward_only(instrumented: Instrumented) -> None:
    case = make_case(4, f"{CHAINS}:several_tensors", partition="uniform")
    forward, back = 8 * (6 * 4 + 6 * 8 + 4), 8 * 6 * 4  # activations, a mask of whole numbers, a constant
    assert predicted_bytes(case) == forward + back + 3 * NORM_BYTES
    assert sent_bytes(instrumented, case) == predicted_bytes(case)


def test_states_are_those_of_the_largest_ranks_stages(instrumented: Instrumented) -> None:
    case = make_case(3, f"{GPT},tied=true", partition="uniform")
    workload = work_of(case)
    foreseen = load("native.pipeline").predicted_memory(workload, registry(workload), case.layout, case.options)
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    assert foreseen is not None
    assert foreseen["parameters"] == max(report.largest_bytes["parameters"] for report in reports)
    assert foreseen["gradients"] == max(report.largest_bytes["gradients"] for report in reports)
    # The counters of AdamW's steps come on top: one for each decay group of a bucket.
    excess = max(report.largest_bytes["optimizer_states"] for report in reports) - foreseen["optimizer_states"]
    assert 0 < excess <= 4 * 2 * 2


@pytest.mark.parametrize(
    ("num_ranks", "recipe", "precision", "options"),
    [
        (2, "num_micro_batches=4,tied=true", "fp32", {"schedule": "gpipe"}),
        (2, "num_micro_batches=5,vocabulary_size=4096,clip_norm=1.0", "fp32", INTERLEAVED),
        (2, "num_micro_batches=4,activation_checkpointing=true", "bf16_fp32_gradients", {}),
        (2, "num_micro_batches=4,vocabulary_size=8192", "bf16", {"schedule": "zero_bubble"}),
        (4, "num_micro_batches=8", "fp32", {"schedule": "zero_bubble"}),
    ],
    ids=str,
)
def test_the_peak_is_that_of_a_step_without_memory(
    instrumented: Instrumented, num_ranks: int, recipe: str, precision: str, options: dict[str, Any]
) -> None:
    """All but the counters of AdamW's steps, sums of losses and the like: some hundred bytes."""
    case = make_case(num_ranks, f"gpt:size=tiny,{recipe}", precision, **options)
    figures = memory.combine(instrumented.adopt(case).command("build_and_measure_memory", num_steps=1))
    foreseen = predicted(work_of(case), load(case.implementation), case.layout, case.options)
    missing = figures["memory.peak_allocated_bytes.max_rank"] - foreseen["memory.predicted_peak_bytes"]
    assert 0 <= missing < 2048
    assert figures["memory.activation_bytes"] - foreseen["memory.predicted_activation_bytes"] in range(256)


def test_a_cut_by_measured_times_foresees_nothing() -> None:
    case = make_case(2, partition="time")
    assert predicted(work_of(case), load(case.implementation), case.layout, case.options) == {}


def test_each_pipeline_of_a_product_of_degrees_is_measured(instrumented: Instrumented) -> None:
    case = Case(workload=GPT, implementation="native.hybrid", layout=Layout(data=2, pipeline=2))
    figures, foreseen = measured(instrumented, case)
    assert figures.in_flight == foreseen.in_flight == (2, 1)
    assert [len(figures.bubble_ratios), len(figures.replayed_bubble_ratios)] == [4, 4]
    assert all(0 < ratio < 1 for ratio in (*figures.bubble_ratios, *figures.replayed_bubble_ratios))


def measured(instrumented: Instrumented, case: Case) -> tuple[PipelineFigures, PredictedPipeline]:
    launch = instrumented.adopt(case)
    launch.command("build")
    figures = pipeline.summarise(launch.command("measure_pipeline", num_steps=5), case.layout.groups("pipeline"))
    foreseen = load(case.implementation).predicted_pipeline(work_of(case), case.layout, case.options)
    assert figures is not None
    assert foreseen is not None
    return figures, foreseen


IN_FLIGHT = {"gpipe": (8, 8, 8, 8), "1f1b": (4, 3, 2, 1), "zero_bubble": (4, 4, 4, 4)}
BUBBLES = {"gpipe": 3 / 11, "1f1b": 3 / 11, "interleaved_1f1b": 3 / 19, "zero_bubble": 3 / 27}


def test_schedules_hold_what_theory_allows(instrumented: Instrumented) -> None:
    """Stages alike on four ranks, eight micro-batches."""
    waits = replayed_bubble_ratios(instrumented)
    assert all(0 < ratio < 0.75 for ratio in waits.values()), waits


@pytest.mark.exhaustive
def test_schedules_wait_in_theorys_order(instrumented: Instrumented) -> None:
    """By the schedule's own clock: the ranks share processors here. Whoever else computes on the machine slows one rank
    more than another, which only adds to a bubble: beside other tests this says little."""
    least = dict.fromkeys(BUBBLES, 1.0)
    for _ in range(8):
        waits = replayed_bubble_ratios(instrumented)
        least = {name: min(least[name], waits[name]) for name in least}
        if are_theorys(least):
            break
    assert are_theorys(least), least


def replayed_bubble_ratios(instrumented: Instrumented) -> dict[str, float]:
    waits: dict[str, float] = {}
    for options in SCHEDULES:
        name = options.get("schedule", "1f1b")
        figures, foreseen = measured(instrumented, make_case(4, f"{CHAINS}:even", partition="uniform", **options))
        assert foreseen.bubble_ratio == pytest.approx(BUBBLES[name])
        assert figures.in_flight == foreseen.in_flight == IN_FLIGHT.get(name, foreseen.in_flight)
        waits[name] = figures.metrics()["pipeline.replayed_bubble_ratio"]
    return waits


def are_theorys(bubbles: dict[str, float]) -> bool:
    in_order = min(bubbles["gpipe"], bubbles["1f1b"]) > bubbles["interleaved_1f1b"] > bubbles["zero_bubble"]
    return in_order and bubbles == pytest.approx(BUBBLES, abs=0.05)
