"""Whatever is not predicted of a peer says why; nothing here needs the peers' libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import implementation, models
from harness.layout import Layout
from harness.measure.predictions import Predictions, predictions
from suites.peers import suite

CPU = torch.device("cpu")
TINY = "gpt:size=tiny,text=stdlib,global_batch_size=4"
OPTIONS = {
    (case.implementation, tuple(case.options.items()), str(case.layout))
    for case in suite.cases
    if case.world_size < 4 and case.role != "floor" and case.implementation != "fairscale.pipe"  # which takes one rank
}


def of(name: str, layout: Layout, workload: str = TINY, *, is_floor: bool = False, **options: Any) -> Predictions:
    kind = implementation.load(name)
    return predictions(models.load(workload), kind, layout, options, CPU, is_floor=is_floor)


@pytest.mark.parametrize(
    ("name", "options", "layout"), [pytest.param(n, dict(o), x, id=f"{n} {dict(o)} {x}") for n, o, x in sorted(OPTIONS)]
)
def test_whatever_the_comparison_leaves_empty_says_why(name: str, options: dict[str, Any], layout: str) -> None:
    micro_batches = ",num_micro_batches=4" if "pipeline" in layout else ""
    found = of(name, Layout.parse(layout), TINY + micro_batches, **options)
    known = {
        "states": "memory.predicted_parameter_bytes",
        "peak": "memory.predicted_peak_bytes",
        "bytes": "communication.predicted_bytes_per_step",
    }
    for figure, metric in known.items():
        assert (metric in found.figures) != (figure in found.missing), figure
    assert not any("does not say" in reason for reason in found.missing.values()), found.missing


@pytest.mark.parametrize(
    ("name", "layout", "options", "figures", "words"),
    [
        ("deepspeed.zero", Layout(data=2), {"offload_optimizer": True}, {"states", "peak"}, "off the device"),
        (
            "deepspeed.zero",
            Layout(data=2),
            {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0},
            {"states", "peak"},
            "DeepSpeed's trace of modules",
        ),
        ("deepspeed.zero", Layout(data=4), {"stage": 3, "zero_hpz_partition_size": 2}, {"bytes"}, "hpz"),
        (
            "deepspeed.zero",
            Layout(data=2),
            {"stage": 2, "use_multi_rank_bucket_allreduce": False, "reduce_bucket_size": 1000},
            {"bytes"},
            "reduce_bucket_size makes several",
        ),
        ("torch.hybrid", Layout(data=2, tensor=2), {}, {"peak"}, "DTensors"),
        ("native.hybrid", Layout(data=2, tensor=2), {"stage": 2}, {"peak"}, "shards of slices"),
    ],
)
def test_options_that_take_a_prediction_away_say_so(
    name: str, layout: Layout, options: dict[str, Any], figures: set[str], words: str
) -> None:
    missing = of(name, layout, **options).missing
    assert set(missing) == figures
    assert all(words in reason for reason in missing.values()), missing


def test_a_rank_alone_and_a_floor_send_nothing_to_predict() -> None:
    assert "bytes" not in of("fairscale.pipe", Layout()).missing
    assert "communication.predicted_bytes_per_step" not in of("native.ddp", Layout(data=2), is_floor=True).figures
