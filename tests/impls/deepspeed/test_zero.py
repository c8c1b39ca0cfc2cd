from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from harness.layout import Layout
from harness.measure import communication, memory
from harness.measure.memory import MemoryReport
from harness.measure.predicted_memory import predicted, registry
from harness.own_process import first_error
from impls.deepspeed.zero import DeepSpeedZero
from tests.conftest import Instrumented, parity_case
from tests.impls.test_figures import make_case, work_of

if TYPE_CHECKING:
    from tests.conftest import Worlds

pytestmark = [pytest.mark.baselines, pytest.mark.timeout(1200)]  # the first one waits for a compilation
NAME = "deepspeed.zero"
SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}


@pytest.fixture(scope="module", autouse=True)
def available() -> None:
    if reason := DeepSpeedZero.unavailable():
        pytest.skip(reason)
    DeepSpeedZero.prepare({"cpu_adam": True})


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instrumented]:
    ranks = Instrumented(tmp_path_factory.mktemp("instrumented"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 2}, SHARDED], ids=str)
def test_a_mean_of_means_parts_and_says_so(worlds: Worlds, options: dict[str, Any]) -> None:
    """What models train that return the mean of their own tokens."""
    options = {**options, "loss_scaling": "rank_mean"}
    parity = worlds.parity(parity_case("awkward:kind=unequal_tokens", NAME, 2, options=options))
    assert not parity.ok
    assert parity.first_bad_step == 0
    assert parity.explanation is not None
    assert "is a mean of means over data ranks and micro-batches" in parity.explanation


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16", {"stage": 0}),
        ("bf16", {"stage": 1}),
        ("bf16", {"stage": 2}),
        ("bf16", SHARDED),
        ("bf16_fp32_gradients", {"stage": 1}),
        ("bf16_fp32_gradients", {"stage": 2}),
        ("bf16_fp32_gradients", SHARDED),
    ],
    ids=str,
)
def test_stays_within_the_envelope_of_bf16(worlds: Worlds, precision: str, options: dict[str, Any]) -> None:
    parity = worlds.parity(parity_case("awkward:kind=clipped", NAME, 2, options=options, precision=precision))
    assert parity.ok, parity.explanation
    assert parity.replicas_bit_equal


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"stage": 2, "cpu_adam": True}),
        (2, {"stage": 1, "cpu_adam": True, "offload_optimizer": True}),
        (2, {**SHARDED, "cpu_adam": True, "offload_optimizer": True}),
        (2, {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 500}),
        (2, {"stage": 2, "reduce_scatter": False, "contiguous_gradients": False}),
        (3, {"stage": 2, "use_multi_rank_bucket_allreduce": False}),
        (4, {**SHARDED, "zero_hpz_partition_size": 2}),
    ],
    ids=str,
)
def test_every_option_trains_the_same(worlds: Worlds, world_size: int, options: dict[str, Any]) -> None:
    parity = worlds.parity(parity_case("awkward:kind=padding_micro_batch", NAME, world_size, options=options))
    assert parity.ok, parity.explanation


@pytest.mark.parametrize(
    ("world_size", "workload", "precision", "options"),
    [
        (2, "awkward:kind=clipped", "fp32", {"stage": 0}),
        (4, "awkward:kind=clipped", "fp32", {"stage": 1}),
        (2, "awkward:kind=clipped", "bf16", {"stage": 1}),
        (4, "awkward:kind=unequal_tokens", "fp32", {"stage": 2, "reduce_bucket_size": 3000}),
        (4, "awkward:kind=clipped", "bf16", {"stage": 0}),
        (2, "awkward:kind=clipped", "fp32", {"stage": 1, "use_multi_rank_bucket_allreduce": False}),
        (4, "awkward:kind=unequal_tokens", "fp32", {"stage": 2, "use_multi_rank_bucket_allreduce": False}),
        (2, "awkward:kind=clipped", "bf16_fp32_gradients", {"stage": 1}),
        (2, "awkward:kind=clipped", "bf16_fp32_gradients", {"stage": 2}),
        (2, "awkward:kind=unequal_tokens", "fp32", {"stage": 3, "stage3_param_persistence_threshold": 300}),
        (4, "awkward:kind=clipped", "bf16", SHARDED),
    ],
    ids=str,
)
def test_bytes_sent_and_held_are_the_closed_form(
    instrumented: Instrumented, world_size: int, workload: str, precision: str, options: dict[str, Any]
) -> None:
    case = make_case(NAME, world_size, workload, precision, **options)
    work = work_of(case)
    parameters = registry(work)
    launch = instrumented.adopt(case)
    reports: list[MemoryReport] = launch.command("build_and_measure_memory", num_steps=1)
    answers = launch.command("measure_communication", num_steps=1)

    sent = communication.summarise([answer["records"] for answer in answers])
    wire = DeepSpeedZero.predicted_wire_bytes(work, parameters, case.layout, options)
    assert sent["communication.bytes_per_step"] == wire
    foreseen = DeepSpeedZero.predicted_memory(work, parameters, case.layout, options)
    assert foreseen is not None
    largest = {
        category: max(report.largest_bytes[category] for report in reports)
        for category in ("gradients", "optimizer_states", "communication_buffers")
    }
    # Each of torch's optimizers keeps a step counter of four bytes for whatever it steps.
    assert 0 <= largest["optimizer_states"] - foreseen["optimizer_states"] <= 4 * len(parameters)
    assert largest["gradients"] == foreseen["gradients"]
    assert largest["communication_buffers"] == foreseen.get("communication_buffers", 0)


TINY = "gpt:size=tiny,text=stdlib,global_batch_size=8"


@pytest.mark.parametrize(
    ("world_size", "workload", "precision", "options"),
    [
        (2, TINY, "fp32", {"stage": 0}),
        (2, TINY, "fp32", {"stage": 1}),
        (4, TINY, "fp32", {"stage": 1}),
        (4, TINY, "fp32", {"stage": 2}),
        (2, f"{TINY},num_micro_batches=2", "fp32", {"stage": 0}),
        (2, f"{TINY},num_micro_batches=2", "fp32", {"stage": 1}),
        (2, f"{TINY},num_micro_batches=2", "fp32", {"stage": 2}),
        (2, "gpt:size=17m,global_batch_size=4", "fp32", {"stage": 1}),
        (2, "gpt:size=17m,global_batch_size=4", "fp32", {"stage": 2}),
        (2, "gpt:size=17m,global_batch_size=4", "fp32", {"stage": 3}),
        (4, TINY, "fp32", {"stage": 3}),
        (2, f"{TINY},num_micro_batches=2", "fp32", SHARDED),
        (2, TINY, "bf16", {"stage": 0}),
        (2, TINY, "bf16", {"stage": 1}),
        (2, TINY, "bf16_fp32_gradients", {"stage": 2}),
        (2, TINY, "fp32", {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 10_000}),
        (2, TINY, "fp32", {"stage": 2, "reduce_bucket_size": 10_000}),
        (2, TINY, "fp32", {"stage": 2, "contiguous_gradients": False}),
    ],
    ids=str,
)
def test_the_peak_is_the_plan(
    instrumented: Instrumented, world_size: int, workload: str, precision: str, options: dict[str, Any]
) -> None:
    case = make_case(NAME, world_size, workload, precision, **options)
    reports: list[MemoryReport] = instrumented.adopt(case).command("build_and_measure_memory", num_steps=1)
    measured = memory.combine(reports)
    plan = predicted(work_of(case), DeepSpeedZero, case.layout, options)
    assert measured["memory.peak_allocated_bytes.max_rank"] == pytest.approx(
        plan["memory.predicted_peak_bytes"], rel=0.03
    )
    for category in ("gradient_bytes", "communication_buffer_bytes"):
        assert measured[f"memory.{category}"] == plan.get(f"memory.predicted_{category}", 0)


def test_null_and_delayed_steps_are_possible(instrumented: Instrumented) -> None:
    """The instrument lies below every collective of DeepSpeed's: none of them misses its delay."""
    launch = instrumented.adopt(make_case(NAME, 2, "awkward:kind=clipped", "fp32", **SHARDED))
    launch.command("build")
    answers = launch.command("measure_communication", num_steps=2)
    assert all(len(answer["null_seconds"]) == 2 for answer in answers)
    delayed = launch.command("measure_latency", num_steps=2, delay_seconds=0.05)
    assert all(answer is not None for answer in delayed)
    assert min(delayed[0]["delayed_seconds"]) > 0.05


def test_another_layout_finds_nothing_of_the_last_one(worlds: Worlds) -> None:
    """DeepSpeed keeps groups for the life of a process."""
    cases = [
        parity_case("awkward:kind=sgd", NAME, 2, options={"stage": 2}),
        parity_case("awkward:kind=sgd", "deepspeed.tensor", 2, layout=Layout(tensor=2)),
        parity_case("awkward:kind=sgd", "deepspeed.pipeline", 2, layout=Layout(pipeline=2)),
        parity_case("awkward:kind=sgd", NAME, 2, options=SHARDED),
    ]
    for case in cases:
        parity = worlds.parity(case)
        assert parity.ok, f"{case.implementation}: {parity.explanation}"


_IN_ONE_RANK = """
import os, torch, torch.distributed as dist
from torch.nn import functional
from harness import models
from harness.layout import Layout
from harness.mesh import Mesh
from harness.topology import Topology
from impls.deepspeed.zero import DeepSpeedZero

before, torchs = dict(os.environ), functional.linear
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
alone, cpu = Layout(data=1), torch.device("cpu")
mesh = Mesh(alone, Topology(ranks_per_node=1), 0, cpu)
for others in ({}, {"memory_efficient_linear": False}):
    made = DeepSpeedZero(models.load("awkward:kind=sgd"), alone, mesh, cpu, stage=3, **others)
    assert (functional.linear is torchs) == bool(others), functional.linear
    made.close()
    assert functional.linear is torchs, functional.linear
    left = {name for name in before | os.environ if before.get(name) != os.environ.get(name)}
    assert not {name for name in left if "RANK" in name or name in ("PATH", "DS_ACCELERATOR", "WORLD_SIZE")}, left
"""


def test_whoever_comes_after_stage_3_in_a_process_has_torchs_own_layers() -> None:
    assert first_error(_IN_ONE_RANK, timeout_seconds=300) is None
