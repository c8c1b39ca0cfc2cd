"""What native.pipeline costs and waits for, measured by the instruments and held against closed forms and theory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.case import Case
from harness.implementation import load
from harness.layout import Layout
from harness.measure import communication, pipeline
from harness.measure.memory import MemoryReport
from harness.measure.pipeline import PipelineFigures
from harness.measure.predicted_memory import registry
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
    predicted = load("native.pipeline").predicted_memory(workload, registry(workload), case.layout, case.options)
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    assert predicted is not None
    assert predicted["parameters"] == max(report.largest_bytes["parameters"] for report in reports)
    assert predicted["gradients"] == max(report.largest_bytes["gradients"] for report in reports)
    # The counters of AdamW's steps come on top: one for each decay group of a bucket.
    excess = max(report.largest_bytes["optimizer_states"] for report in reports) - predicted["optimizer_states"]
    assert 0 < excess <= 4 * 2 * 2


def test_each_pipeline_of_a_product_of_degrees_is_measured(instrumented: Instrumented) -> None:
    case = Case(workload=GPT, implementation="native.hybrid", layout=Layout(data=2, pipeline=2))
    figures, predicted = measured(instrumented, case)
    assert figures.in_flight == predicted.in_flight == (2, 1)
    assert [len(figures.bubble_ratios), len(figures.replayed_bubble_ratios)] == [4, 4]
    assert all(0 < ratio < 1 for ratio in (*figures.bubble_ratios, *figures.replayed_bubble_ratios))


def measured(instrumented: Instrumented, case: Case) -> tuple[PipelineFigures, PredictedPipeline]:
    launch = instrumented.adopt(case)
    launch.command("build")
    figures = pipeline.summarise(launch.command("measure_pipeline", num_steps=5), case.layout.groups("pipeline"))
    predicted = load(case.implementation).predicted_pipeline(work_of(case), case.layout, case.options)
    assert figures is not None
    assert predicted is not None
    return figures, predicted


IN_FLIGHT = {"gpipe": (8, 8, 8, 8), "1f1b": (4, 3, 2, 1), "zero_bubble": (4, 4, 4, 4)}
BUBBLES = {"gpipe": 3 / 11, "1f1b": 3 / 11, "interleaved_1f1b": 3 / 19, "zero_bubble": 3 / 27}


def test_schedules_wait_in_theorys_order_and_hold_what_theory_allows(instrumented: Instrumented) -> None:
    """Stages alike on four ranks, eight micro-batches. By the schedule's own clock: the ranks share processors here.
    Whoever else computes on the machine slows one rank more than another, which only adds to a bubble."""
    least = dict.fromkeys(BUBBLES, 1.0)
    for _ in range(3):
        for options in SCHEDULES:
            name = options.get("schedule", "1f1b")
            figures, predicted = measured(instrumented, make_case(4, f"{CHAINS}:even", partition="uniform", **options))
            assert predicted.bubble_ratio == pytest.approx(BUBBLES[name])
            assert figures.in_flight == predicted.in_flight == IN_FLIGHT.get(name, predicted.in_flight)
            least[name] = min(least[name], figures.metrics()["pipeline.replayed_bubble_ratio"])
        if are_theorys(least):
            break
    assert are_theorys(least), least


def are_theorys(bubbles: dict[str, float]) -> bool:
    in_order = min(bubbles["gpipe"], bubbles["1f1b"]) > bubbles["interleaved_1f1b"] > bubbles["zero_bubble"]
    return in_order and bubbles == pytest.approx(BUBBLES, abs=0.05)
