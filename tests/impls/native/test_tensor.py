"""What conformance does not show of native.tensor: bytes, memory, llama by transformers' own plan, bf16, and what it
refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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
from harness.tensor_plan import ColumnParallel, RowParallel
from tests.conftest import parity_case
from tests.impls.test_figures import work_of

if TYPE_CHECKING:
    from tests.conftest import Instrumented, Worlds

TRANSPORTS = ("process_group", "shared_memory")
PROBABILITIES = f"{Path(__file__).parent / 'workloads.py'}:probabilities"
GPT = "gpt:size=tiny,num_micro_batches=2"


def make_case(degree: int, workload: str = GPT, **options: Any) -> Case:
    return Case(workload=workload, implementation="native.tensor", layout=Layout(tensor=degree), options=options)


def communicated(instrumented: Instrumented, case: Case) -> dict[str, float]:
    launch = instrumented.adopt(case)
    launch.command("build")
    launch.command("time_steps", num_steps=2)
    answers = launch.command("measure_communication", num_steps=1)
    return communication.summarise([answer["records"] for answer in answers])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("degree", [2, 4])
def test_bytes_are_four_all_reduces_a_layer(
    instrumented: Instrumented, degree: int, transport: str, sequence_parallel: bool
) -> None:
    """Of samples x length x width each, for each micro-batch; without a cut sequence one more for the embedding and one
    for the head, and with it the same in halves. Three numbers a token for the loss."""
    case = make_case(degree, transport=transport, sequence_parallel=sequence_parallel)
    workload = work_of(case)
    sent = communicated(instrumented, case)["communication.bytes_per_step"]
    foreseen = load("native.tensor").predicted_wire_bytes(workload, registry(workload), case.layout, case.options)
    assert sent == foreseen
    inputs = workload.batch(0).micro_batches[0].inputs
    num_layers, width, num_micro_batches = 2, 32, 2
    all_reduce = 2 * (degree - 1) / degree * inputs.numel() * width * 4
    loss = (degree - 1) * 3 * inputs.numel() * 4
    assert num_layers * 4 * all_reduce * num_micro_batches <= sent
    if not sequence_parallel:
        assert sent == num_micro_batches * ((4 * num_layers + 2) * all_reduce + loss)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_states_in_memory_are_the_closed_form(instrumented: Instrumented, transport: str) -> None:
    case = make_case(2, transport=transport)
    workload = work_of(case)
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    foreseen = load("native.tensor").predicted_memory(workload, registry(workload), case.layout, case.options)
    assert foreseen is not None
    largest = {category: max(r.largest_bytes[category] for r in reports) for category in foreseen}
    for category in ("parameters", "communication_buffers"):
        assert largest[category] == foreseen[category], category
    # The process group's threads may let go of the last sums of activations only after backward.
    assert 0 <= largest["gradients"] - foreseen["gradients"] <= 4 * 64 * 32 * 4
    whole = sum(parameter.num_bytes for parameter in registry(workload))
    assert whole / 2 < foreseen["parameters"] < 0.6 * whole  # norms and positions are whole


@pytest.mark.parametrize("options", [{}, {"transport": "shared_memory"}, {"sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("workload", ["llama:size=tiny", "llama:size=tiny,tied=true,num_micro_batches=2,clip_norm=0.1"])
def test_llama_is_cut_by_transformers_own_plan(worlds: Worlds, workload: str, options: dict[str, Any]) -> None:
    case = parity_case(workload, "native.tensor", 2, layout=Layout(tensor=2), options=options, precision="fp64")
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dropout_between_regions_is_that_of_one_process(worlds: Worlds, transport: str) -> None:
    text = "gpt:size=tiny,dropout=0.2,attention_dropout=0.0,num_micro_batches=2"
    options = {"transport": transport}
    parity = worlds.parity(
        parity_case(text, "native.tensor", 2, layout=Layout(tensor=2), options=options, precision="fp64")
    )
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_a_model_does_across_the_vocabulary_sees_all_of_it(worlds: Worlds, sequence_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel}
    layout = Layout(tensor=2)
    case = parity_case(PROBABILITIES, "native.tensor", 2, layout=layout, options=options, precision="fp64")
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp32_gradients"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_low_precision_stays_within_its_envelope(worlds: Worlds, precision: str, sequence_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel}
    layout = Layout(tensor=2)
    case = parity_case("awkward:kind=clipped", "native.tensor", 2, layout=layout, options=options, precision=precision)
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(
    ("workload", "layout", "message"),
    [
        (
            "convnet",
            Layout(tensor=2),
            "workload convnet has no tensor plan: it does not say which layers to cut, and how",
        ),
        (
            "llama:size=tiny",
            Layout(tensor=4),
            "tensor=4 does not divide causal.model.layers.0.self_attn.k_proj: 16 output features are 2 units of 8",
        ),
        ("gpt", Layout(tensor=2, data=2), "tensor parallelism takes a tensor degree alone, got data=2 tensor=2"),
        ("gpt:dropout=0.1", Layout(tensor=2), "dropout within a cut layer draws other masks than one process does"),
        (
            "gpt:dropout=0.1,attention_dropout=0.0",
            Layout(tensor=2),
            "dropout on a piece of the sequence draws other masks than one process does on all of it",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_refused_before_any_process_starts(workload: str, layout: Layout, message: str) -> None:
    options = {"sequence_parallel": "attention_dropout" in workload}
    reason = load("native.tensor").unsupported(models.load(workload), layout, torch.device("cpu"), options)
    assert reason is not None
    assert reason.startswith(message), reason


def test_a_cut_sequence_needs_a_head_that_puts_it_together() -> None:
    plan = {"*.perceptron.projection": RowParallel(), "*.expansion": ColumnParallel()}
    workload = replace(models.load(GPT), tensor_plan=lambda model: plan)
    reasons = [
        load("native.tensor").unsupported(workload, Layout(tensor=2), torch.device("cpu"), {"sequence_parallel": value})
        for value in (False, True)
    ]
    assert reasons[0] is None
    assert reasons[1] is not None
    assert reasons[1].startswith("sequence_parallel needs a vocabulary-parallel head")
