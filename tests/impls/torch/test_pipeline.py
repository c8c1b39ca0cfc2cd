"""What conformance does not show of torch.pipeline: numbers of micro-batches, borders of all sorts, bytes on the wire
and in memory, and what torch's schedules cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import models
from harness.case import Case
from harness.implementation import load
from harness.layout import Layout
from harness.measure import communication, pipeline
from harness.measure.memory import MemoryReport
from harness.measure.predicted_memory import registry
from harness.workload import in_precision
from tests.conftest import parity_case
from tests.impls.test_figures import predicted_bytes, work_of

if TYPE_CHECKING:
    from tests.conftest import Instrumented, Worlds

CHAINS = Path(__file__).with_name("chains.py")
MUTANTS = Path(__file__).with_name("pipeline_mutants.py")
BORDERS = Path(__file__).parent.parent / "native/chains.py"
GPIPE: dict[str, Any] = {"schedule": "gpipe"}
ONE_F_ONE_B: dict[str, Any] = {"schedule": "1f1b"}
INTERLEAVED: dict[str, Any] = {"schedule": "interleaved_1f1b", "chunks": 2}
ZERO_BUBBLE: dict[str, Any] = {"schedule": "zero_bubble"}
V_SHAPED: dict[str, Any] = {"schedule": "zero_bubble", "chunks": 2}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "num_micro_batches"),
    [(GPIPE, 1), (ONE_F_ONE_B, 5), (INTERLEAVED, 3), (ZERO_BUBBLE, 1), (ZERO_BUBBLE, 8), (V_SHAPED, 2), (V_SHAPED, 5)],
    ids=str,
)
def test_any_number_of_micro_batches(worlds: Worlds, options: dict[str, Any], num_micro_batches: int) -> None:
    """The embedding is tied to the head: on the first stage and the last, which the V has on one rank."""
    training = f"num_micro_batches={num_micro_batches},global_batch_size={2 * num_micro_batches},clip_norm=0.5"
    text = f"gpt:size=tiny,tied=true,{training}"
    parity = worlds.parity(
        parity_case(text, "torch.pipeline", 2, layout=Layout(pipeline=2), options=options, precision="fp64")
    )
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(
    ("name", "num_stages", "options"),
    [
        (f"{BORDERS}:several_tensors:num_micro_batches=4", 4, ONE_F_ONE_B),
        (f"{BORDERS}:several_tensors:num_micro_batches=2", 2, V_SHAPED),
        (f"{BORDERS}:several_tensors:num_micro_batches=4", 3, ZERO_BUBBLE),
        (f"{BORDERS}:empty_stage", 3, ZERO_BUBBLE),
        (f"{BORDERS}:frozen_start", 3, GPIPE),
        (f"{CHAINS}:two_shifts", 3, ONE_F_ONE_B),
        (f"{CHAINS}:transposing", 3, ONE_F_ONE_B),
    ],
)
def test_borders_of_all_sorts(worlds: Worlds, name: str, num_stages: int, options: dict[str, Any]) -> None:
    layout = Layout(pipeline=num_stages)
    options = {**options, "partition": "uniform"}
    parity = worlds.parity(
        parity_case(name, "torch.pipeline", num_stages, layout=layout, options=options, precision="fp64")
    )
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("options", [ONE_F_ONE_B, V_SHAPED], ids=str)
def test_stays_within_the_envelope_of_bf16(worlds: Worlds, options: dict[str, Any]) -> None:
    layout = Layout(pipeline=2)
    parity = worlds.parity(
        parity_case("awkward:kind=clipped", "torch.pipeline", 2, layout=layout, options=options, precision="bf16")
    )
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(
    "mutant", ["ClipsEachStage", "CountsTiesTwice", "LeavesTiesApart", "DividesAgain", "MixesUpLabels"]
)
def test_parity_catches(worlds: Worlds, mutant: str) -> None:
    layout = Layout(pipeline=2)
    parity = worlds.parity(parity_case("awkward:kind=tied", f"{MUTANTS}:{mutant}", 2, layout=layout, precision="fp64"))
    assert not parity.ok


@pytest.mark.parametrize(
    ("options", "num_activations", "num_ties"),
    [
        # of the rank that sends most, with each micro-batch; whether embedding and head are on different ranks
        (GPIPE, 1, 1),
        (ONE_F_ONE_B, 1, 1),
        (INTERLEAVED, 3, 1),
        (ZERO_BUBBLE, 1, 1),
        (V_SHAPED, 2, 0),
    ],
    ids=str,
)
def test_bytes_are_the_closed_form(
    instrumented: Instrumented, options: dict[str, Any], num_activations: int, num_ties: int
) -> None:
    """One activation a border each way, the tied gradient once each way, and the norm."""
    case = Case(
        workload="gpt:size=tiny,tied=true,num_micro_batches=4,clip_norm=0.5",
        implementation="torch.pipeline",
        layout=Layout(pipeline=2),
        options=options,
    )
    launch = instrumented.adopt(case)
    launch.command("build")
    launch.command("time_steps", num_steps=2)
    answers = launch.command("measure_communication", num_steps=1)
    sent = communication.summarise([answer["records"] for answer in answers])["communication.bytes_per_step"]
    activation = work_of(case).batch(0).micro_batches[0].inputs.numel() * 32 * 4
    assert sent == 4 * num_activations * activation + num_ties * 256 * 32 * 4 + 8
    assert predicted_bytes(case) == sent


@pytest.mark.parametrize(
    ("options", "precision"), [(ONE_F_ONE_B, "fp32"), (V_SHAPED, "fp32"), (ZERO_BUBBLE, "bf16")], ids=str
)
def test_memory_is_the_closed_form(instrumented: Instrumented, options: dict[str, Any], precision: str) -> None:
    case = Case(
        workload="gpt:size=tiny,tied=true,num_micro_batches=4",
        implementation="torch.pipeline",
        layout=Layout(pipeline=2),
        options=options,
        precision=precision,
    )
    workload = work_of(case)
    predicted = load("torch.pipeline").predicted_memory(workload, registry(workload), case.layout, options)
    assert predicted is not None
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    for category in ("parameters", "gradients", "communication_buffers"):
        assert max(report.largest_bytes[category] for report in reports) == predicted[category], category
    # Torch keeps a step counter of four bytes beside the moments of each parameter.
    excess = max(report.largest_bytes["optimizer_states"] for report in reports) - predicted["optimizer_states"]
    assert 0 < excess <= 4 * len(registry(workload))


def test_what_is_foreseen_of_each_category_is_the_most_that_any_rank_holds() -> None:
    """Of three ranks the last holds most, for the head; the one in the middle receives from both sides."""
    work = models.load("gpt:size=tiny,num_micro_batches=4")
    foreseen = load("torch.pipeline").predicted_memory(work, registry(work), Layout(pipeline=3), GPIPE)
    assert foreseen is not None
    activation = work.batch(0).micro_batches[0].inputs.numel() * 32 * 4
    assert foreseen["communication_buffers"] == 4 * 2 * activation


@pytest.mark.parametrize(
    ("options", "in_flight"),
    [(GPIPE, (4, 4)), (ONE_F_ONE_B, (2, 1)), (ZERO_BUBBLE, (2, 2))],
    ids=str,
)
def test_actions_are_marked(instrumented: Instrumented, options: dict[str, Any], in_flight: tuple[int, ...]) -> None:
    """All of torch's own order, so that it can be played again."""
    case = Case(
        workload="gpt:size=tiny,num_micro_batches=4",
        implementation="torch.pipeline",
        layout=Layout(pipeline=2),
        options=options,
    )
    launch = instrumented.adopt(case)
    launch.command("build")
    steps = launch.command("measure_pipeline", num_steps=2)
    figures = pipeline.summarise(steps, case.layout.groups("pipeline"))
    assert figures is not None
    assert figures.in_flight == in_flight
    assert all(0 <= ratio < 1 for ratio in (*figures.bubble_ratios, *figures.replayed_bubble_ratios))
    kinds = "FIW" if options["schedule"] == "zero_bubble" else "FB"
    of_last = [recorded.action for recorded in steps[1][0]]
    assert sorted(of_last) == sorted(f"1{kind}{micro_batch}" for kind in kinds for micro_batch in range(4))


@pytest.mark.parametrize(
    ("workload", "layout", "options", "precision", "message"),
    [
        (
            "gpt:num_micro_batches=2",
            Layout(pipeline=3),
            ONE_F_ONE_B,
            "fp64",
            "torch's 1F1B takes as many micro-batches",
        ),
        (
            "gpt:num_micro_batches=5",
            Layout(pipeline=2),
            ZERO_BUBBLE,
            "fp64",
            "torch's zero_bubble takes rounds of equally many micro-batches, got 5 in 2 rounds of at least 2",
        ),
        (
            "gpt:num_micro_batches=3",
            Layout(pipeline=2),
            {},
            "fp64",
            "torch's stages take micro-batches of one shape, got (2, 16) and (3, 16)",
        ),
        (
            f"{BORDERS}:changing_lengths",
            Layout(pipeline=2),
            {},
            "fp64",
            "torch's stages take micro-batches of one shape",
        ),
        (
            f"{BORDERS}:skipping",
            Layout(pipeline=2),
            {},
            "fp64",
            "pipeline: 2 uses what 0 has made, past the blocks between them",
        ),
        (
            f"{BORDERS}:frozen_start",
            Layout(pipeline=2),
            {**ZERO_BUBBLE, "partition": "uniform"},
            "fp64",
            "torch's zero-bubble finds no weights in stage 1, which receives nothing with a gradient",
        ),
        (
            f"{CHAINS}:one_shift",
            Layout(pipeline=3),
            ZERO_BUBBLE,
            "fp64",
            "torch's zero-bubble adds to memory that the gradient of blocks.0.shifts.0 shares with another",
        ),
        (f"{CHAINS}:two_shifts", Layout(pipeline=3), ZERO_BUBBLE, "fp64", "torch's zero-bubble adds to memory that"),
        (
            f"{CHAINS}:transposing",
            Layout(pipeline=3),
            {**ZERO_BUBBLE, "partition": "uniform"},
            "fp64",
            "torch's zero-bubble sends gradients as they come, and that of stage",
        ),
        ("gpt", Layout(pipeline=8), GPIPE, "fp64", "8 stages need as many blocks, got the 4 of gpt"),
        ("convnet", Layout(pipeline=2), GPIPE, "fp64", "workload convnet has no chain"),
        ("gpt", Layout(pipeline=2, data=2), GPIPE, "fp64", "pipeline parallelism takes a pipeline degree alone, got"),
        ("gpt", Layout(pipeline=2), GPIPE, "bf16_fp32_gradients", "torch.distributed.pipelining sums gradients in"),
    ],
    ids=str,
)
def test_what_torch_cannot_do_is_refused_before_any_process_starts(
    workload: str, layout: Layout, options: dict[str, Any], precision: str, message: str
) -> None:
    loaded = in_precision(models.load(workload), precision)
    reason = load("torch.pipeline").unsupported(loaded, layout, CPU, options)
    assert reason is not None
    assert reason.startswith(message), reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b", "chunks": 2}, "1f1b takes one stage a rank, got chunks 2"),
        ({"schedule": "zero_bubble", "chunks": 0}, "chunks must be at least 1, got 0"),
    ],
    ids=str,
)
def test_options_without_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    assert load("torch.pipeline").refused_options(options) == message
