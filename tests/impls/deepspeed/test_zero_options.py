"""What deepspeed.zero refuses and foresees; none of it needs the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import models
from harness.layout import Layout
from harness.measure.predicted_memory import registry
from harness.workload import in_precision
from impls.deepspeed.parts.zero_config import zero_config
from impls.deepspeed.zero import DeepSpeedZero

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 4}, "stage must be one of 0, 1, 2, 3, got 4"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size must be at least 1, got 0"),
        (
            {"stage": 2, "stage3_max_reuse_distance": 0},
            "stage3_max_reuse_distance is an option of stage 3, got stage 2",
        ),
        ({"stage": 3, "zero_hpz_partition_size": 0}, "zero_hpz_partition_size must be at least 1, got 0"),
        (
            {"stage": 3, "use_multi_rank_bucket_allreduce": False},
            "use_multi_rank_bucket_allreduce is an option of stages 1 and 2, got stage 3",
        ),
        ({"stage": 0, "reduce_bucket_size": 1000}, "reduce_bucket_size is an option of stages 1 to 3, got stage 0"),
        ({"stage": 0, "offload_optimizer": True}, "offload_optimizer needs a stage of at least 1, got 0"),
        ({"loss_scaling": "mean"}, "loss_scaling must be global_tokens or rank_mean, got 'mean'"),
    ],
)
def test_wrong_values_are_told(options: dict[str, Any], words: str) -> None:
    assert DeepSpeedZero.refused_options(options) == words


@pytest.mark.parametrize(
    ("kind", "precision", "layout", "options", "words"),
    [
        ("sgd", "fp64", Layout(data=2), {}, "reduces no fp64 gradients"),
        ("sgd", "bf16_fp32_gradients", Layout(data=2), {"stage": 0}, "no gradients wider than weights"),
        ("nonfinite", "bf16_fp32_gradients", Layout(data=2), {"stage": 1}, "never skips a step"),
        ("unused", "fp32", Layout(data=2), {}, "parameters that nobody used"),
        ("odd_shapes", "fp32", Layout(data=2), {}, "without dims, as scale is"),
        ("mixed_dtypes", "fp32", Layout(data=2), {}, "one dtype, got bfloat16, float32, float64"),
        ("sgd", "fp32", Layout(data=4, shard=2), {"stage": 3}, "shards over all of it"),
        ("sgd", "fp32", Layout(data=2), {"stage": 0, "cpu_adam": True}, "DeepSpeedCPUAdam is AdamW, got sgd"),
        ("sgd", "fp32", Layout(data=3), {"stage": 3, "zero_hpz_partition_size": 2}, "got 2 and 3"),
    ],
)
def test_what_it_cannot_train_is_told_before_anything_starts(
    kind: str, precision: str, layout: Layout, options: dict[str, Any], words: str
) -> None:
    workload = in_precision(models.load(f"awkward:kind={kind}"), precision)
    reason = DeepSpeedZero.unsupported(workload, layout, CPU, options)
    assert reason is not None
    assert words in reason


def test_recipes_are_spelled_out() -> None:
    """Clipping, the norm and the bucket are ours to say: DeepSpeed would clip at 1.0, and allocate 2 GB."""
    workload = models.load("awkward:kind=few_micro_batches")
    parameters = registry(workload)
    config = zero_config(parameters, workload, {"stage": 2})
    trained = sum(parameter.num_elements for parameter in parameters)
    assert config == {"stage": 2, "reduce_bucket_size": trained, "compute_grad_norm": False}
    clipped = models.load("awkward:kind=clipped")
    assert "compute_grad_norm" not in zero_config(registry(clipped), clipped, {"stage": 2})


@pytest.mark.parametrize(
    ("options", "strategies"),
    [
        ({"stage": 0}, ("data_parallel",)),
        ({}, ("zero_1",)),
        ({"stage": 2}, ("zero_2",)),
        ({"stage": 3}, ("zero_3", "zero_2")),
        ({"stage": 3, "stage3_max_reuse_distance": 0}, ("zero_3", "zero_2")),
        ({"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}, ("zero_3",)),
    ],
)
def test_stages_are_strategies(options: dict[str, Any], strategies: tuple[str, ...]) -> None:
    assert DeepSpeedZero.comparable_strategies(options) == strategies


@pytest.mark.parametrize(
    ("workload", "options", "words"),
    [
        ("awkward:kind=sgd", {"clipping": "default"}, "clipped at 1, DeepSpeed's default; the recipe clips none"),
        ("awkward:kind=clipped", {"clipping": "default"}, None),
        ("awkward:kind=unequal_tokens", {"loss_scaling": "rank_mean", "stage": 2}, "whose counts differ ("),
        ("gpt:size=tiny,text=stdlib,global_batch_size=8", {"loss_scaling": "rank_mean"}, None),
        ("awkward:kind=unequal_tokens", {"stage": 2, "cpu_adam": True, "overlap_comm": True}, None),
    ],
)
def test_options_that_depart_from_the_recipe_say_so(workload: str, options: dict[str, Any], words: str | None) -> None:
    found = DeepSpeedZero.other_work(models.load(workload), Layout(data=2), options)
    assert found is None if words is None else found is not None and words in found


def test_everything_that_departs_is_told() -> None:
    options = {"clipping": "default", "loss_scaling": "rank_mean"}
    found = DeepSpeedZero.other_work(models.load("awkward:kind=unequal_tokens"), Layout(data=2), options)
    assert found is not None
    assert found.count("; ") == 2
