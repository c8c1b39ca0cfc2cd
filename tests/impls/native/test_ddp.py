"""What conformance on the awkward workloads does not show of native.ddp: when it does things, what it refuses, low
precision, and steps that are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from harness.launch.failure import LaunchFailed
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

HERE = Path(__file__).parent
REPLACED = HERE / "replaced.py"
SCENES = HERE / "scenes.py"
WORKLOADS = HERE / "workloads.py"
TRANSPORTS = [{}, {"transport": "shared_memory"}]


@pytest.mark.parametrize("scene", ["WeightsWait", "OverlapsBackward", "StrayBackward", "StepsAgainAfterLooking"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"small_bytes": 0},
        {"transport": "shared_memory", "small_bytes": 500},
        {"small_bytes": 0, "direct_gradients": False},
    ],
    ids=str,
)
def test_scene(worlds: Worlds, scene: str, options: dict[str, Any]) -> None:
    options = {"bucket_bytes": 2000, **options}
    parity = worlds.parity(
        parity_case("awkward:kind=unequal_tokens", f"{SCENES}:{scene}", 2, options=options, precision="fp64")
    )
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("scene", ["StrayBackward", "NobodyLooks"])
@pytest.mark.parametrize("options", TRANSPORTS, ids=str)
def test_scene_of_one_bucket_of_small_gradients(worlds: Worlds, scene: str, options: dict[str, Any]) -> None:
    parity = worlds.parity(
        parity_case("awkward:kind=unequal_tokens", f"{SCENES}:{scene}", 2, options=options, precision="fp64")
    )
    assert parity.ok, parity.explanation


@pytest.mark.parametrize("how", ["parameter", "data"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("UnderDataParallel", {}), *(("UnderShardedOptimizer", {"stage": stage}) for stage in (1, 2, 3))],
    ids=str,
)
def test_a_parameter_replaced_after_the_build_is_an_error(
    worlds: Worlds, name: str, options: dict[str, Any], how: str
) -> None:
    case = parity_case(
        "awkward:kind=unequal_tokens", f"{REPLACED}:{name}", 1, options={"how": how, **options}, precision="fp64"
    )
    worlds.adopt(case).command("time_steps", num_steps=1)


@pytest.mark.parametrize("name", ["native.ddp", "native.zero"])
def test_sparse_gradients_are_refused_by_name(worlds: Worlds, name: str) -> None:
    with pytest.raises(LaunchFailed, match=f"{name} .*embedding is an embedding with sparse=True"):
        worlds.adopt(parity_case(f"{WORKLOADS}:sparse", name, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "tree"}, "reduction must be one of all_reduce, ring, parameter_server, none, got 'tree'"),
        ({"transport": "rdma"}, "transport must be one of process_group, shared_memory, got 'rdma'"),
    ],
    ids=str,
)
def test_an_unknown_way_to_sum_is_refused(worlds: Worlds, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchFailed, match=message):
        worlds.adopt(parity_case("awkward:kind=unequal_tokens", "native.ddp", 1, options=options))


@pytest.mark.parametrize("options", [{}, {"transport": "shared_memory", "bucket_bytes": 100}], ids=str)
def test_order_of_use_need_not_be_that_of_registration(worlds: Worlds, options: dict[str, Any]) -> None:
    case = parity_case(f"{WORKLOADS}:out_of_order", f"{SCENES}:InOrderOfUse", 2, options=options, precision="fp64")
    assert worlds.parity(case).ok


def test_buffers_that_are_new_tensors_after_each_step_are_those_of_the_first_rank(worlds: Worlds) -> None:
    trajectory = worlds.trajectory(parity_case(f"{WORKLOADS}:reassigned", "native.ddp", 2, precision="fp64"))
    assert trajectory.replica_checksums[0] == trajectory.replica_checksums[1]
    assert float(trajectory.buffers["seen"]) > 0


@pytest.mark.parametrize("options", TRANSPORTS, ids=str)
def test_all_ranks_skip_a_step_together_and_the_rate_follows_updates(worlds: Worlds, options: dict[str, Any]) -> None:
    case = parity_case("awkward:kind=nonfinite", "native.ddp", 3, options=options, precision="fp64")
    trajectory = worlds.trajectory(case)
    assert trajectory.skipped == [False, True, False]
    rates = [rate for (rate,) in trajectory.learning_rates]
    assert rates[0] < rates[1] == rates[2]
    assert all(bool(torch.isfinite(value).all()) for value in trajectory.parameters.values())
    checksums = list(trajectory.replica_checksums.values())  # of parameters and moments, after each step
    assert checksums[0] == checksums[1] == checksums[2]
    bits = [checksum.split()[0] for checksum in checksums[0]]  # the norm stands behind them
    assert bits[0] == bits[1] != bits[2]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_skipped_step_tells_its_gradients_as_they_came(worlds: Worlds, precision: str) -> None:
    """Whatever the clipping of the step before has divided them by."""
    workload = f"{WORKLOADS}:clipped_and_skipping"
    ours, right = (
        worlds.trajectory(parity_case(workload, name, size, precision=precision))
        for name, size in (("native.ddp", 2), ("reference", 1))
    )
    assert ours.skipped == [False, True, False]
    tolerance = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 0.05}[precision]
    for step in (0, 1):
        for name, gradient in right.gradients[step].items():
            torch.testing.assert_close(
                ours.gradients[step][name], gradient, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=False
            )


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp32_gradients"])
@pytest.mark.parametrize("kind", ["clipped", "padding_micro_batch", "sgd"])
def test_low_precision_stays_within_its_envelope(worlds: Worlds, kind: str, precision: str) -> None:
    """SGD clipped, AdamW clipped, SGD plain; with masters."""
    for options in TRANSPORTS:
        parity = worlds.parity(
            parity_case(f"awkward:kind={kind}", "native.ddp", 2, options=options, precision=precision)
        )
        assert parity.ok, parity.explanation


def accumulated(worlds: Worlds, name: str, precision: str) -> float:
    """The relative error of the first step's gradient over 256 micro-batches."""
    case = parity_case(f"{WORKLOADS}:drops", name, 2 if name != "reference" else 1, precision=precision)
    (gradient,) = worlds.trajectory(case).gradients[0].values()
    right = 1 + sum(index // 2 % 65 for index in range(512)) / 512 / 128
    return abs(float(gradient) - right) / right


@pytest.mark.parametrize("name", ["native.ddp", "reference"])
def test_gradients_in_fp32_add_up_over_many_micro_batches(worlds: Worlds, name: str) -> None:
    assert accumulated(worlds, name, "bf16_fp32_gradients") < 1e-6
    assert accumulated(worlds, name, "bf16") > 1e-2


def test_masters_are_what_full_parameters_tell(worlds: Worlds) -> None:
    trajectory = worlds.trajectory(parity_case("awkward:kind=clipped", "native.ddp", 2, precision="bf16"))

    def rounded(value: Tensor) -> bool:
        return torch.equal(value, value.bfloat16().to(value.dtype))

    assert all(value.dtype is torch.float32 for value in trajectory.parameters.values())
    assert not all(rounded(value) for value in trajectory.parameters.values())


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1, "small_bytes": 0}], ids=str)
def test_gradients_of_backwards_within_backward_add_up(worlds: Worlds, options: dict[str, Any]) -> None:
    """Re-entrant checkpoints announce a layer that they share once each."""
    text = f"{HERE / 'called_in_backward.py'}:one_layer"
    parity = worlds.parity(parity_case(text, "native.ddp", 2, options=options, precision="fp64"))
    assert parity.ok, parity.explanation
