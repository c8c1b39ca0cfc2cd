"""FairScale's implementations beside one process, where conformance does not look: other precisions, and settings that
train another model, which must be caught and explained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import implementation, models
from harness.layout import Layout
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

pytestmark = [pytest.mark.baselines, pytest.mark.usefixtures("fairscale")]

SCENES = Path(__file__).with_name("fsdp_scenes.py")
GPT = "awkward:kind=unequal_tokens"
UNREDUCED = "every gradient is one rank's share alone, multiplied by the data degree ({}): not reduced, though step 0's"


@pytest.mark.parametrize(
    ("name", "workload", "layout", "precision", "options"),
    [
        ("fairscale.oss", "awkward:kind=clipped", Layout(data=3), "bf16", {}),
        ("fairscale.sharded_ddp", GPT, Layout(data=3), "fp32", {"set_to_none": True, "reduce_buffer_size": 0}),
        ("fairscale.tensor", GPT, Layout(tensor=2), "bf16", {}),
        ("fairscale.tensor", "llama:size=tiny,global_batch_size=4", Layout(tensor=2), "fp64", {}),
        ("fairscale.pipe", GPT, Layout(), "bf16_fp32_gradients", {"chunks": 2}),
        (f"{SCENES}:WithoutStreams", GPT, Layout(data=2), "fp32", {}),
        (f"{SCENES}:WithoutStreams", "awkward:kind=clipped", Layout(data=3), "fp32", {"reshard_after_forward": False}),
        (f"{SCENES}:WithoutStreams", "awkward:kind=batch_norm", Layout(data=2), "fp32", {}),
        (f"{SCENES}:WithoutStreams", GPT, Layout(), "fp32", {}),
    ],
    ids=lambda value: str(value).rpartition("/")[2],
)
def test_trains_what_one_process_trains(
    worlds: Worlds, name: str, workload: str, layout: Layout, precision: str, options: dict[str, Any]
) -> None:
    case = parity_case(workload, name, layout.world_size, layout=layout, options=options, precision=precision)
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation
    assert parity.replicas_bit_equal


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_cleared_to_none_are_found_to_go_unreduced(worlds: Worlds, world_size: int, precision: str) -> None:
    case = parity_case(GPT, "fairscale.sharded_ddp", world_size, options={"set_to_none": True}, precision=precision)
    parity = worlds.parity(case)
    assert not parity.ok
    assert parity.first_bad_step == 1
    assert UNREDUCED.format(world_size) in str(parity.explanation)


def test_a_mean_of_ranks_means_is_found_where_counts_are_unequal(worlds: Worlds) -> None:
    options = {"loss_scaling": "rank_mean"}
    parity = worlds.parity(parity_case(GPT, "fairscale.sharded_ddp", 2, options=options))
    assert not parity.ok
    assert "is a mean of means over data ranks and micro-batches" in str(parity.explanation)


def test_fully_sharded_says_what_it_lacks_on_a_cpu() -> None:
    answer = implementation.load("fairscale.fsdp").unsupported(
        models.load(GPT), Layout(data=2), torch.device("cpu"), {}
    )
    assert answer == "FullyShardedDataParallel needs CUDA streams; on a CPU: KeyError: 'all_gather'"
