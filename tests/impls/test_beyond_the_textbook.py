"""Why some send more than their strategy's textbook: told where they do, and not on a backend on which they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import implementation, models, textbook
from harness.layout import Layout
from harness.measure.predicted_memory import registry

CPU, GPU = torch.device("cpu"), torch.device("cuda")
OVER_GLOO = "over gloo a reduce-scatter is an all-reduce of twice the bytes"
TO_OWNERS = {"stage": 2, "use_multi_rank_bucket_allreduce": False}


@pytest.mark.parametrize(
    ("name", "options", "on_cpu", "on_gpu"),
    [
        ("native.ddp", {}, None, None),
        ("native.ddp", {"reduction": "parameter_server"}, "sends every other one", "sends every other one"),
        ("native.zero", {"stage": 3}, None, None),
        ("torch.zero", {}, "broadcast parameters besides, and in gloo", "broadcast parameters besides"),
        ("torch.fsdp", {}, OVER_GLOO, None),
        ("fairscale.oss", {}, "broadcast parameters besides, and in gloo", "broadcast parameters besides"),
        ("fairscale.sharded_ddp", {}, "reductions to an owner", None),
        ("deepspeed.zero", {"stage": 0}, None, None),
        ("deepspeed.zero", {}, "are all-reduced", "are all-reduced"),
        ("deepspeed.zero", TO_OWNERS, "reductions to an owner", None),
        ("deepspeed.zero", {**TO_OWNERS, "reduce_scatter": False}, "are all-reduced", "are all-reduced"),
        ("deepspeed.zero", {"stage": 3}, OVER_GLOO, None),
    ],
)
def test_the_reason_is_that_of_the_backend_and_whoever_sends_more_has_one(
    name: str, options: dict[str, Any], on_cpu: str | None, on_gpu: str | None
) -> None:
    kind = implementation.load(name)
    for device, words in ((CPU, on_cpu), (GPU, on_gpu)):
        told = kind.beyond_the_textbook(device, options)
        assert told is None if words is None else words in str(told)
        assert device is CPU or "gloo" not in str(told)
    workload, layout = models.load("gpt:size=tiny"), Layout(data=4)
    parameters = registry(workload)
    sent = kind.predicted_wire_bytes(workload, parameters, layout, options)
    by_the_book = textbook.bytes_per_step(kind.strategy_of(options), workload, parameters, layout)
    assert sent is not None
    assert by_the_book is not None
    assert on_cpu is not None or sent <= 1.1 * by_the_book
