from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from harness import models
from harness.case import Case
from harness.launch.failure import LaunchFailed
from harness.layout import Layout
from harness.measure import communication, memory, predicted_memory
from harness.measure.memory import MemoryReport
from harness.measure.predicted_memory import registry
from harness.workload import Workload, in_precision
from impls.torch.fsdp import TorchFullySharded
from impls.torch.parts.sharded_units import group_blocks
from tests.conftest import parity_case
from tests.impls.torch import fsdp_scenes

if TYPE_CHECKING:
    from tests.conftest import Instrumented, Worlds

SCENES = Path(fsdp_scenes.__file__)
CHAIN = f"{SCENES}:chain"
NO_RESHARDING = {"reshard_after_forward": False}
WHOLE_GRADIENTS = {"reduce_each_micro_batch": False}
PAIRS = {"blocks_per_group": 2}
HYBRID = Layout(data=4, shard=2)


@pytest.mark.parametrize(
    ("workload", "layout", "options", "precision"),
    [
        ("awkward:kind=clipped", HYBRID, {}, "fp64"),
        ("awkward:kind=rank_dependent", HYBRID, WHOLE_GRADIENTS, "fp64"),
        ("awkward:kind=tied", Layout(data=2), NO_RESHARDING | WHOLE_GRADIENTS, "fp64"),
        ("awkward:kind=checkpointed", Layout(data=3), PAIRS, "fp64"),
        (f"{SCENES}:twice", Layout(data=2), {}, "fp64"),
        ("awkward:kind=clipped", Layout(data=2), {}, "fp32"),
        ("awkward:kind=clipped", Layout(data=2), {}, "bf16"),
        ("awkward:kind=padding_micro_batch", HYBRID, {}, "bf16"),
        ("awkward:kind=clipped", Layout(data=2), WHOLE_GRADIENTS, "bf16_fp32_gradients"),
    ],
    ids=str,
)
def test_trains_what_one_process_trains(
    worlds: Worlds, workload: str, layout: Layout, options: dict[str, Any], precision: str
) -> None:
    case = parity_case(workload, "torch.fsdp", layout.data, layout=layout, options=options, precision=precision)
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation
    assert parity.replicas_bit_equal


@pytest.mark.parametrize(
    ("workload", "world_size", "reason"),
    [
        ("holds", 1, "something else still holds layer.weight"),
        ("leaves_a_block_out", 2, "this rank's forward left out second"),
        ("undeclared", 2, "0.branch.weight has no gradient on this rank"),
    ],
)
def test_refuses_what_would_train_wrongly_in_silence(
    worlds: Worlds, workload: str, world_size: int, reason: str
) -> None:
    with pytest.raises(LaunchFailed, match=reason):
        worlds.trajectory(parity_case(f"{SCENES}:{workload}", "torch.fsdp", world_size))


def make_case(
    workload: str, layout: Layout, options: dict[str, Any], precision: str = "fp32", implementation: str = "torch.fsdp"
) -> Case:
    return Case(workload=workload, implementation=implementation, layout=layout, options=options, precision=precision)


def work_of(case: Case) -> Workload:
    return in_precision(models.load(case.workload), case.precision)


@pytest.mark.parametrize(
    ("workload", "layout", "options", "precision"),
    [
        (CHAIN, Layout(data=2), PAIRS, "bf16"),
        (f"{CHAIN}:num_micro_batches=2,clip_norm=1.0", HYBRID, {}, "fp32"),
        (f"{CHAIN}:num_micro_batches=2", Layout(data=2), NO_RESHARDING, "fp32"),
        (f"{CHAIN}:num_micro_batches=2", Layout(data=3), WHOLE_GRADIENTS, "bf16_fp32_gradients"),
        (f"{CHAIN}:num_frozen=3", Layout(data=2), {}, "fp32"),
        ("awkward:kind=tied", Layout(data=4), {}, "fp32"),
        ("awkward:kind=rank_dependent", Layout(data=2), {}, "fp32"),
        ("awkward:kind=batch_norm", Layout(data=3), {}, "fp32"),
    ],
    ids=str,
)
def test_bytes_on_the_wire_are_the_closed_form(
    instrumented: Instrumented, workload: str, layout: Layout, options: dict[str, Any], precision: str
) -> None:
    """Exactly: shards are padded, so that no rank's part of anything but small sums has to be rounded."""
    case = make_case(workload, layout, options, precision)
    launch = instrumented.adopt(case)
    launch.command("build")
    answers = launch.command("measure_communication", num_steps=1)
    metrics = communication.summarise([answer["records"] for answer in answers])
    work = work_of(case)
    predicted = TorchFullySharded.predicted_wire_bytes(work, registry(work), layout, options)
    assert predicted is not None
    assert metrics["communication.bytes_per_step"] == predicted


@pytest.mark.parametrize(
    ("layout", "precision", "per_parameter"),
    [
        # bytes of a shard's parameter (the master, where there is one), gradient and states, for each of its elements
        (Layout(data=3), "fp64", (8, 8, 16)),
        (HYBRID, "bf16", (4, 4, 8)),
    ],
    ids=str,
)
def test_states_in_memory_are_the_closed_form(
    instrumented: Instrumented, layout: Layout, precision: str, per_parameter: tuple[int, int, int]
) -> None:
    """Of the first rank; beside the moments there is a step counter of four bytes for each parameter."""
    case = make_case("awkward:kind=few_micro_batches", layout, {}, precision, f"{SCENES}:WithoutTransport")
    work = work_of(case)
    first_rows = {p.name: -(-p.shape[0] // layout.shard_degree) for p in registry(work)}
    num_elements = sum(first_rows[p.name] * (p.num_elements // p.shape[0]) for p in registry(work))
    parameters, gradients, states = (num_bytes * num_elements for num_bytes in per_parameter)
    predicted = TorchFullySharded.predicted_memory(work, registry(work), layout, {})
    assert predicted is not None
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    largest = {name: max(report.largest_bytes[name] for report in reports) for name in reports[0].largest_bytes}
    assert largest["parameters"] == predicted["parameters"] == parameters
    assert largest["gradients"] == predicted["gradients"] == gradients
    assert largest["optimizer_states"] - 4 * len(registry(work)) == predicted["optimizer_states"] == states


def unlisted(report: MemoryReport) -> int:
    """Dies before its step ends; what is gathered for one use alone dies within its forward."""
    return report.largest_bytes["other"]


def above_states_in_forward(report: MemoryReport) -> int:
    """Where there are no gradients yet."""
    states = report.largest_bytes["parameters"] + report.largest_bytes["optimizer_states"]
    return report.phase_peak_bytes["forward"] - states


def above_states_at_peak(report: MemoryReport) -> int:
    return report.at_peak_bytes["other"] + report.at_peak_bytes["activations"]


@pytest.mark.parametrize(
    ("workload", "layout", "options", "precision", "buffers_in"),
    [
        (CHAIN, Layout(data=2), {}, "fp32", unlisted),
        (CHAIN, Layout(data=2), PAIRS, "bf16", unlisted),
        (CHAIN, Layout(data=2), NO_RESHARDING, "fp32", above_states_in_forward),
        (f"{CHAIN}:num_micro_batches=2", Layout(data=2), NO_RESHARDING, "fp32", above_states_at_peak),
        (CHAIN, Layout(data=2, shard=1), {}, "fp32", unlisted),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_gathered_units_and_gradients_on_their_way_are_the_closed_form(
    instrumented: Instrumented,
    workload: str,
    layout: Layout,
    options: dict[str, Any],
    precision: str,
    buffers_in: Callable[[MemoryReport], int],
) -> None:
    """Without what the transport copies; what samples need beside buffers is less than a thirtieth of them here."""
    case = make_case(workload, layout, options, precision, f"{SCENES}:WithoutTransport")
    work = work_of(case)
    predicted = TorchFullySharded.predicted_memory(work, registry(work), layout, options)
    assert predicted is not None
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    assert 1.0 <= max(map(buffers_in, reports)) / predicted["communication_buffers"] < 1.03


STATES_OUTWEIGH = "gpt:size=tiny,vocabulary_size=4096"
TWO = "num_micro_batches=2"


@pytest.mark.parametrize(
    ("workload", "layout", "options", "precision"),
    [
        (STATES_OUTWEIGH, Layout(data=2), {}, "fp32"),
        (f"{STATES_OUTWEIGH},{TWO}", Layout(data=2), WHOLE_GRADIENTS, "bf16_fp32_gradients"),
        (f"{STATES_OUTWEIGH},tied=true", Layout(data=4), NO_RESHARDING, "fp32"),
        (f"{STATES_OUTWEIGH},{TWO}", HYBRID, PAIRS, "bf16"),
    ],
    ids=str,
)
def test_the_peak_is_the_plan(
    instrumented: Instrumented, workload: str, layout: Layout, options: dict[str, Any], precision: str
) -> None:
    case = make_case(workload, layout, options, precision)
    figures = memory.combine(instrumented.adopt(case).command("build_and_measure_memory", num_steps=1))
    foreseen = predicted_memory.predicted(work_of(case), TorchFullySharded, layout, options)
    measured = figures["memory.peak_allocated_bytes.max_rank"]
    assert measured == pytest.approx(foreseen["memory.predicted_peak_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("workload", "options", "elements"),
    [
        # sum of 2: received 1, gradient 2, what is put in, gloo's copy of it; shards of the gradients 2 to 5
        (CHAIN, {}, 32_768 + 3 * 65_536 + (65_536 + 49_152 + 30_720 + 20_480) // 2),
        # the same of a second micro-batch, which finds all shards of the first
        (f"{CHAIN}:{TWO}", {}, 32_768 + 3 * 65_536 + 65_536 // 2 + 215_040 // 2),
        # the same where 0 and 1 are whole all along
        (CHAIN, NO_RESHARDING, 16_384 + 32_768 + 3 * 65_536 + (65_536 + 49_152 + 30_720 + 20_480) // 2),
        # second backward of 3 begins: whole 3, received 2, gloo's copy of it, put in 4; whole gradients 0 to 3; shards
        (f"{CHAIN}:{TWO}", WHOLE_GRADIENTS, 49_152 + 2 * 65_536 + 30_720 + 163_840 + (30_720 + 20_480) // 2),
    ],
    ids=str,
)
def test_at_the_peak_are_the_buffers_of_one_moment(workload: str, options: dict[str, Any], elements: int) -> None:
    """The matrices 0 to 5 have 16384, 32768, 65536, 49152, 30720 and 20480 elements; samples need a fiftieth."""
    work, layout = models.load(workload), Layout(data=2)
    states = TorchFullySharded.predicted_memory(work, registry(work), layout, options)
    assert states is not None
    peak = predicted_memory.predicted(work, TorchFullySharded, layout, options)["memory.predicted_peak_bytes"]
    buffers = peak - states["parameters"] - states["optimizer_states"]
    assert 1.0 <= buffers / (4 * elements) < 1.02


def test_does_not_reshard_where_it_competes_with_stage_two() -> None:
    assert TorchFullySharded.comparable_strategies({}) == ("zero_3",)
    assert TorchFullySharded.comparable_strategies(NO_RESHARDING) == ("zero_3", "zero_2")


def test_a_group_holds_a_block_at_least() -> None:
    assert TorchFullySharded.refused_options(PAIRS) is None
    assert TorchFullySharded.refused_options({"blocks_per_group": 0}) == "blocks_per_group must be at least 1, got 0"


@pytest.mark.parametrize(
    ("workload", "blocks_per_group", "expected"),
    [
        (
            "awkward:kind=few_micro_batches",
            1,
            [["embedding"], ["block0"], ["block1"], ["block2"], ["block3"], ["head"]],
        ),
        ("awkward:kind=few_micro_batches", 4, [["embedding", "block0", "block1", "block2"], ["block3", "head"]]),
        ("awkward:kind=tied", 1, [["block0"], ["block1"]]),
        ("awkward:kind=tied", 3, [["block0", "block1"]]),
        ("awkward:kind=alias", 1, []),
        ("awkward:kind=reused", 1, [["0"], ["1"], ["3"]]),  # 2 is a tanh
        ("awkward:kind=odd_shapes", 1, []),  # the model is one block: the root
    ],
)
def test_blocks_are_grouped_unless_they_share(workload: str, blocks_per_group: int, expected: list[list[str]]) -> None:
    work = models.load(workload)
    model = work.model_without_memory()
    names = {module: name for name, module in model.named_modules()}
    groups = group_blocks(work, model, blocks_per_group)
    assert [[names[block] for block in blocks] for blocks in groups] == expected


def extra(*shape: int, **options: Any) -> Workload:
    return fsdp_scenes.with_parameter(lambda: nn.Parameter(torch.ones(shape), **options))


@pytest.mark.parametrize(
    ("workload", "layout", "reason"),
    [
        (models.load("awkward:kind=sgd"), HYBRID, None),
        (models.load("awkward:kind=sgd"), Layout(data=2, tensor=2), "takes a data and a shard degree"),
        (models.load("awkward:kind=batch_norm"), Layout(data=8), "cannot be shared by 8 data ranks"),
        (models.load("awkward:kind=synchronised_batch_norm"), Layout(data=2), "runs on accelerators only"),
        (models.load("awkward:kind=odd_shapes"), Layout(data=2), "along their first dim: scale has shape ()"),
        (models.load("awkward:kind=mixed_dtypes"), Layout(data=2), "along their first dim: 1.scale"),
        (models.load("awkward:kind=non_contiguous"), Layout(data=2), "contiguous parameters only: 0.weight has shape"),
        (extra(6), Layout(data=2), None),
        (extra(0, 6), Layout(data=2), "a gradient without elements: 0.extra has shape (0, 6)"),
        (extra(0, 6, requires_grad=False), Layout(data=2), None),
        (extra(requires_grad=False), Layout(data=2), "along their first dim: 0.extra"),
        (fsdp_scenes.with_parameter(fsdp_scenes.with_hook), Layout(data=2), "loses their hooks: 0.extra has one"),
    ],
)
def test_says_what_it_does_not_do(workload: Workload, layout: Layout, reason: str | None) -> None:
    answer = TorchFullySharded.unsupported(workload, layout, torch.device("cpu"), {})
    assert answer is None if reason is None else answer is not None and reason in answer


def test_a_group_reduces_gradients_of_one_dtype() -> None:
    layers = [nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.float64), nn.EmbeddingBag(6, 6, sparse=True)]
    for chosen, options, reason in (
        (layers[:2], {}, None),
        (layers[:2], PAIRS, "got 0.weight in float32, 1.weight in float64"),
        ([nn.Sequential(*layers[:2])], {}, "got 0.0.weight in float32, 0.1.weight in float64"),
        (layers[2:], {}, "0 is an embedding with sparse=True"),
    ):
        work = fsdp_scenes.with_layers(*chosen, fixed_dtypes=True)
        answer = TorchFullySharded.unsupported(work, Layout(data=2), torch.device("cpu"), options)
        assert answer is None if reason is None else answer is not None and reason in answer
