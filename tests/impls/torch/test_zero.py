from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW

from harness import models
from harness.layout import Layout
from harness.measure import communication
from harness.measure.memory import MemoryReport
from harness.measure.predicted_memory import registry
from harness.parameters import LogicalParameter
from harness.precision import PRECISIONS
from harness.workload import in_precision
from impls.torch.zero import TorchZero
from tests.conftest import parity_case
from tests.impls.test_figures import make_case, work_of

if TYPE_CHECKING:
    from tests.conftest import Instrumented, Worlds

SCENES = Path(__file__).with_name("zero_scenes.py")
ONE_WEIGHT = f"{SCENES}:one_weight"


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        (
            "awkward:kind=schedule",
            # 2 * 0.05 in two steps, then a cosine from there
            {"expected_rates": [0.05, 0.1, 0.1], "decays": [0.1, 0.0]},
        ),
        (
            "awkward:kind=sometimes_unused,schedule=linear,warmup_steps=0,total_steps=4,final_learning_rate_ratio=0",
            {
                "expected_rates": [1e-3, 0.75e-3, 0.5e-3],
                "decays": [0.5, 0.0],
                "late": ("0.branch.", [0, 2]),
            },
        ),
    ],
    ids=["sgd", "adamw"],
)
def test_each_rank_steps_what_it_owns_by_the_recipe(worlds: Worlds, workload: str, options: dict[str, Any]) -> None:
    parity = worlds.parity(parity_case(workload, f"{SCENES}:Stepping", 3, options=options, precision="fp64"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("kind", ["odd_shapes", "non_contiguous"])
def test_trains_the_same_without_buffers_for_its_parameters(worlds: Worlds, kind: str) -> None:
    options = {"parameters_as_bucket_view": False}
    parity = worlds.parity(parity_case(f"awkward:kind={kind}", "torch.zero", 3, options=options, precision="fp64"))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(
    ("workload", "precision", "options"),
    [
        ("awkward:kind=unequal_tokens", "fp32", {}),
        ("awkward:kind=clipped", "bf16", {}),
        ("awkward:kind=padding_micro_batch", "bf16", {"parameters_as_bucket_view": False}),
        (ONE_WEIGHT, "bf16", {}),
    ],
    ids=str,
)
def test_stays_within_the_envelope_of_its_precision(
    worlds: Worlds, workload: str, precision: str, options: dict[str, Any]
) -> None:
    """With masters, which are broadcast: all ranks hold the same bits of them."""
    parity = worlds.parity(parity_case(workload, "torch.zero", 3, options=options, precision=precision))
    assert parity.ok, parity.explanation
    assert parity.replicas_bit_equal


def logical(name: str, num_elements: int, *, decayed: bool, trainable: bool = True) -> LogicalParameter:
    return LogicalParameter(name=name, shape=(num_elements,), dtype=torch.float32, trainable=trainable, decayed=decayed)


@pytest.mark.parametrize(
    ("num_ranks", "precision", "largest_states"),
    [
        # elements dealt out: 3 2 2 that decay, then 4 1: {3, 4} {2, 2, 1}
        (2, "fp32", 8 * 7),
        (3, "fp32", 8 * 6),  # {3, 1} {2, 4} {2}
        (6, "fp32", 8 * 4),
        (1, "bf16", 12 * 12),
        (2, "bf16", 4 * 12 + 8 * 7),  # masters of all 12, moments of 7
    ],
)
def test_the_largest_share_is_that_of_torch(num_ranks: int, precision: str, largest_states: int) -> None:
    parameters = [
        logical("a", 2, decayed=True),
        logical("b", 4, decayed=False),
        logical("c", 3, decayed=True),
        logical("frozen", 50, decayed=True, trainable=False),
        logical("d", 1, decayed=False),
        logical("e", 2, decayed=True),
    ]
    workload = in_precision(models.load("awkward:kind=few_micro_batches"), precision)
    assert workload.precision is PRECISIONS[precision]
    predicted = TorchZero.predicted_memory(workload, parameters, Layout(data=num_ranks), {})
    assert predicted is not None
    assert predicted["optimizer_states"] == largest_states


@pytest.mark.parametrize(
    ("workload", "world_size", "precision", "options"),
    [
        ("awkward:kind=unused", 2, "bf16", {"parameters_as_bucket_view": False}),
        (ONE_WEIGHT, 4, "fp64", {}),
        ("awkward:kind=buffers", 3, "fp32", {}),
        ("awkward:kind=odd_shapes", 4, "fp64", {}),
    ],
    ids=str,
)
def test_bytes_sent_and_held_are_the_closed_form(
    instrumented: Instrumented, workload: str, world_size: int, precision: str, options: dict[str, Any]
) -> None:
    """Beside the moments AdamW keeps a step counter of four bytes for each parameter that the rank owns."""
    case = make_case("torch.zero", world_size, workload, precision, **options)
    work = work_of(case)
    launch = instrumented.adopt(case)
    reports: list[MemoryReport] = launch.command("build_and_measure_memory", num_steps=1)
    answers = launch.command("measure_communication", num_steps=1)

    sent = communication.summarise([answer["records"] for answer in answers])
    wire = TorchZero.predicted_wire_bytes(work, registry(work), case.layout, options)
    assert sent["communication.bytes_per_step"] == wire
    owners = len(registry(work)) if options else world_size
    assert sent["communication.calls.broadcast"] == owners + (2 if "buffers" in workload else 0)

    predicted = TorchZero.predicted_memory(work, registry(work), case.layout, options)
    assert predicted is not None
    assert {report.largest_bytes["parameters"] for report in reports} == {predicted["parameters"]}
    largest = max(report.largest_bytes["optimizer_states"] for report in reports)
    counters = largest - predicted["optimizer_states"]
    assert counters % 4 == 0
    assert 0 <= counters <= 4 * len(registry(work))
    if work.training.num_micro_batches == 1:
        assert {report.largest_bytes["gradients"] for report in reports} == {predicted["gradients"]}


def test_parameters_of_several_dtypes_are_refused_by_torch_itself() -> None:
    model = models.load("awkward:kind=mixed_dtypes").build_model()
    with pytest.raises(ValueError, match="only supports using the same dense type"):
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW, lr=1e-3)


@pytest.mark.parametrize(
    ("workload", "precision", "layout", "device", "reason"),
    [
        ("awkward:kind=sgd", "fp32", Layout(data=2), "cpu", None),
        ("awkward:kind=sgd", "fp32", Layout(data=4, shard=4), "cpu", None),
        ("awkward:kind=sgd", "bf16", Layout(data=2), "cpu", None),
        ("awkward:kind=sgd", "fp32", Layout(data=4, shard=2), "cpu", "shards over all of it, got data=4 shard=2"),
        ("awkward:kind=sgd", "fp32", Layout(data=2, shard=1), "cpu", "shards over all of it, got data=2 shard=1"),
        ("awkward:kind=sgd", "fp32", Layout(tensor=2), "cpu", "got tensor=2"),
        ("awkward:kind=sgd", "fp32", Layout(pipeline=2), "cpu", "got pipeline=2"),
        ("awkward:kind=mixed_dtypes", "fp32", Layout(data=2), "cpu", "one dtype, got bfloat16, float32, float64"),
        ("awkward:kind=synchronised_batch_norm", "fp32", Layout(data=2), "cpu", "runs on accelerators only"),
        ("awkward:kind=synchronised_batch_norm", "fp32", Layout(data=2), "cuda", None),
        ("awkward:kind=sgd", "bf16_fp32_gradients", Layout(data=2), "cpu", "in the parameters' dtype"),
        ("awkward:kind=batch_norm", "fp32", Layout(data=8), "cpu", "cannot be shared by 8 data ranks"),
    ],
)
def test_says_what_it_does_not_do(
    workload: str, precision: str, layout: Layout, device: str, reason: str | None
) -> None:
    work = in_precision(models.load(workload), precision)
    answer = TorchZero.unsupported(work, layout, torch.device(device), {})
    assert answer is None if reason is None else answer is not None and reason in answer
