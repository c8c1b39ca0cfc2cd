from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch

from harness import models
from harness.layout import Layout
from harness.measure import communication, memory
from harness.measure.memory import MemoryReport
from harness.measure.predicted_memory import predicted, registry
from harness.workload import in_precision
from impls.deepspeed.parts import tensor_costs
from impls.deepspeed.parts.tensor_slices import Head, Slice, slices_of
from impls.deepspeed.tensor import DeepSpeedTensorParallel
from tests.conftest import Instrumented, parity_case
from tests.impls.test_conformance import skip_unless_available
from tests.impls.test_figures import make_case, work_of

if TYPE_CHECKING:
    from tests.conftest import Worlds

NAME = "deepspeed.tensor"


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instrumented]:
    ranks = Instrumented(tmp_path_factory.mktemp("instrumented"))
    yield ranks
    ranks.close()


def test_a_tensor_plan_becomes_a_partition_config() -> None:
    """Fused layers are cut part by part; gains that heads share have their gradients summed."""
    workload = models.load("awkward:kind=gqa")
    with torch.device("meta"):
        model = workload.model()
    cut = slices_of(model, workload, head="gathered")
    by_pattern = {spec["patterns"][0]: spec for spec in cut.partition_config["layer_specs"]}
    assert by_pattern[r"block0\.attention\.projection\.weight$"]["partition_type"] == "row"
    assert by_pattern[r"head\.vocabulary\.weight$"]["gather_output"] is True
    summed = by_pattern[r"block0\.attention\.key_norm\.weight$"]
    assert (summed["partition_type"], summed["grad_allreduce"], len(summed["patterns"])) == ("skip", True, 4)
    assert cut.slices["block1.attention.query.bias"] == Slice(dim=0)
    assert "block1.attention.projection.bias" not in cut.slices

    fused = models.load("awkward:kind=sgd")
    with torch.device("meta"):
        cut = slices_of(fused.model(), fused, head="whole")
    name = "block0.attention.query_key_value"
    assert cut.slices[f"{name}.weight"] == Slice(dim=0, parts=3)
    specs = [spec for spec in cut.partition_config["layer_specs"] if "shape" in spec]
    assert [spec["shape"] for spec in specs] == [[3, -1], [3, -1]]


def test_a_head_stays_cut_where_the_loss_takes_parts() -> None:
    """DeepSpeed is told of it by the last part of its name, and cuts the embedding that shares its weight; where it
    cannot, every rank gathers the logits, or of a tied head computes them all."""
    workload = models.load("awkward:kind=tied")
    with torch.device("meta"):
        model = workload.model()
    cut = slices_of(model, workload, head="cut")
    assert (cut.head, cut.cut_head, cut.cut_embeddings) == ("cut", "head.vocabulary", ("embedding.token",))
    assert {name for name in cut.slices if "block" not in name} == {
        *("head.vocabulary.weight", "head.vocabulary.bias", "embedding.token.weight")
    }
    assert cut.configuration["vocab_parallel_lm_head"] is True
    assert cut.partition_config["lm_head_patterns"] == ["vocabulary"]
    others: tuple[Head, ...] = ("gathered", "whole")
    for other in others:
        tied = slices_of(model, workload, head=other)
        assert (tied.head, tied.cut_embeddings, tied.configuration["vocab_parallel_lm_head"]) == ("whole", (), False)
        assert not any("vocabulary" in name or "embedding" in name for name in (*tied.layers, *tied.slices))

    untied = models.load("awkward:kind=sgd")
    with torch.device("meta"):
        model = untied.model()
    assert slices_of(model, untied, head="cut").cut_embeddings == ()
    own_loss = replace(untied, loss=lambda outputs, targets: outputs.sum())
    assert slices_of(model, own_loss, head="cut").head == "gathered"
    model.block0.add_module("vocabulary", torch.nn.Linear(1, 1))
    assert slices_of(model, untied, head="cut").head == "gathered"


def test_logits_that_stay_cut_cost_three_numbers_a_target() -> None:
    """Beside the sum of the gradient of the head's input, which gathered ones cost too; a cut embedding's outputs are
    summed."""
    workload, layout = models.load("gpt:size=tiny,global_batch_size=4"), Layout(tensor=4)
    targets, width, vocabulary = 4 * 16, 32, 256
    cut, gathered, whole = (tensor_costs.wire_bytes(workload, layout, head=head) for head in get_args(Head))
    summed = 2 * 3 * targets * width * 4 // 4
    assert cut - whole == summed + 3 * 2 * 3 * targets * 4 // 4
    assert gathered - whole == summed + 3 * targets * (vocabulary // 4) * 4
    tied = models.load("gpt:size=tiny,global_batch_size=4,tied=true")
    assert tensor_costs.wire_bytes(tied, layout, head="cut") - cut == summed


def test_where_backward_computes_again_no_bytes_are_foreseen() -> None:
    """Sums included: how many of them torch decides."""
    work, layout = models.load("awkward:kind=checkpointed"), Layout(tensor=2)
    assert DeepSpeedTensorParallel.predicted_wire_bytes(work, registry(work), layout, {}) is None
    assert "computes blocks again" in DeepSpeedTensorParallel.unpredicted(work, registry(work), layout, {})["bytes"]


@pytest.mark.parametrize(
    ("kind", "layout", "precision", "words"),
    [
        ("sgd", Layout(data=2, tensor=2), "fp32", "takes a tensor degree alone"),
        ("sgd", Layout(tensor=2), "fp64", "reduces no fp64 gradients"),
        ("clipped", Layout(tensor=2), "bf16", "leaves out the slices of all ranks but the first"),
        ("sgd", Layout(tensor=3), "fp32", "tensor=3 does not divide"),
    ],
)
def test_what_it_cannot_train_is_told_before_anything_starts(
    kind: str, layout: Layout, precision: str, words: str
) -> None:
    workload = in_precision(models.load(f"awkward:kind={kind}"), precision)
    reason = DeepSpeedTensorParallel.unsupported(workload, layout, torch.device("cpu"), {})
    assert reason is not None
    assert words in reason


@pytest.mark.baselines
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("world_size", "workload", "precision", "options"),
    [
        (2, "llama:size=tiny,global_batch_size=4", "fp32", {}),
        (2, "llama:size=tiny,global_batch_size=4", "fp32", {"head": "gathered"}),
        (2, "awkward:kind=unequal_tokens", "bf16", {}),
        (2, "awkward:kind=tied", "fp32", {}),
        (1, "awkward:kind=sgd", "fp32", {}),
    ],
    ids=str,
)
def test_trains_what_one_process_trains(
    worlds: Worlds, world_size: int, workload: str, precision: str, options: dict[str, Any]
) -> None:
    skip_unless_available(NAME)
    layout = Layout(tensor=world_size)
    case = parity_case(workload, NAME, world_size, layout=layout, options=options, precision=precision)
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation
    assert parity.replicas_bit_equal


@pytest.mark.baselines
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("world_size", "workload", "options"),
    [
        (2, "awkward:kind=gqa", {"head": "gathered"}),
        (2, "awkward:kind=vocabulary", {}),
        (2, "awkward:kind=tied", {}),
    ],
    ids=str,
)
def test_bytes_sent_and_held_are_the_closed_form(
    instrumented: Instrumented, world_size: int, workload: str, options: dict[str, Any]
) -> None:
    skip_unless_available(NAME)
    case = replace(make_case(NAME, world_size, workload, **options), layout=Layout(tensor=world_size))
    work = work_of(case)
    launch = instrumented.adopt(case)
    reports: list[MemoryReport] = launch.command("build_and_measure_memory", num_steps=1)
    answers = launch.command("measure_communication", num_steps=1)
    sent = communication.summarise([answer["records"] for answer in answers])
    wire = DeepSpeedTensorParallel.predicted_wire_bytes(work, registry(work), case.layout, options)
    assert sent["communication.bytes_per_step"] == wire
    states = DeepSpeedTensorParallel.predicted_memory(work, registry(work), case.layout, options)
    assert states is not None
    for category in ("parameters", "gradients", "communication_buffers"):
        assert max(report.largest_bytes[category] for report in reports) == states[category], category


@pytest.mark.baselines
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("world_size", "workload", "precision", "options"),
    [
        (2, "gpt:size=tiny,vocabulary_size=4096,global_batch_size=4", "fp32", {}),
        (2, "gpt:size=tiny,vocabulary_size=4096,global_batch_size=4,num_micro_batches=2", "fp32", {"head": "gathered"}),
        (4, "gpt:size=tiny,vocabulary_size=4096,global_batch_size=4", "bf16", {}),
        (2, "awkward:kind=tied", "fp32", {}),
    ],
    ids=str,
)
def test_the_peak_is_the_plan(
    instrumented: Instrumented, world_size: int, workload: str, precision: str, options: dict[str, Any]
) -> None:
    skip_unless_available(NAME)
    case = replace(make_case(NAME, world_size, workload, precision, **options), layout=Layout(tensor=world_size))
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    measured = memory.combine(reports)["memory.peak_allocated_bytes.max_rank"]
    foreseen = predicted(work_of(case), DeepSpeedTensorParallel, case.layout, options)
    assert measured == pytest.approx(foreseen["memory.predicted_peak_bytes"], rel=0.03)
