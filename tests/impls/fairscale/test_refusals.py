"""What FairScale's implementations do not take, and why. Needs no FairScale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import implementation, models
from harness.layout import Layout
from harness.workload import in_precision

GPT = "awkward:kind=unequal_tokens"
TWO, TENSOR = Layout(data=2), Layout(tensor=2)


@pytest.mark.parametrize(
    ("name", "workload", "precision", "layout", "reason"),
    [
        ("oss", GPT, "fp32", TWO, None),
        ("oss", GPT, "bf16", Layout(data=4, shard=4), None),
        ("oss", GPT, "fp32", Layout(data=4, shard=2), "OSS takes a data degree and shards over all of it, got data=4"),
        ("oss", GPT, "fp32", TENSOR, "got tensor=2"),
        ("oss", "awkward:kind=mixed_dtypes", "fp32", TWO, "of one dtype, got bfloat16, float32, float64"),
        ("oss", GPT, "bf16_fp32_gradients", TWO, "in the parameters' dtype"),
        ("oss", "awkward:kind=synchronised_batch_norm", "fp32", TWO, "runs on accelerators only"),
        ("sharded_ddp", GPT, "fp64", TWO, None),
        ("sharded_ddp", GPT, "bf16", TWO, "keeps no fp32 masters"),
        ("sharded_ddp", "awkward:kind=unused", "fp32", TWO, "unused parameter's gradient as zero"),
        ("sharded_ddp", GPT, "fp32", Layout(data=2, shard=1), "ShardedDataParallel takes a data degree and shards"),
        ("fsdp", GPT, "fp64", TWO, "takes parameters in fp32, got fp64"),
        ("fsdp", "awkward:kind=mixed_dtypes", "fp32", TWO, "takes parameters in fp32, got several dtypes"),
        ("fsdp", "awkward:kind=unused", "fp32", TWO, "expects a gradient of every parameter"),
        ("fsdp", "awkward:kind=tied", "fp32", TWO, "embedding.token.weight is used in several"),
        ("fsdp", "awkward:kind=odd_shapes", "fp32", TWO, "has none"),
        ("tensor", GPT, "fp64", TENSOR, None),
        ("tensor", GPT, "bf16", TENSOR, None),
        ("tensor", GPT, "fp64", Layout(data=2, tensor=2), "take a tensor degree alone, got data=2 tensor=2"),
        ("tensor", GPT, "bf16_fp32_gradients", TENSOR, "gradients have the parameters' dtype"),
        ("tensor", "awkward:kind=vocabulary", "fp64", TENSOR, "of embedding.token do not divide by 2"),
        ("tensor", "awkward:kind=batch_norm", "fp64", TENSOR, "has no tensor plan"),
        ("pipe", GPT, "fp64", Layout(), None),
        ("pipe", GPT, "fp64", Layout(pipeline=2), "on whose one device they lie: one rank, got pipeline=2"),
        ("pipe", "awkward:kind=dropout", "fp64", Layout(), "draws other random numbers"),
        ("pipe", "awkward:kind=batch_norm", "fp64", Layout(), "statistics of a chunk"),
    ],
)
def test_says_what_it_does_not_do(name: str, workload: str, precision: str, layout: Layout, reason: str | None) -> None:
    work = in_precision(models.load(workload), precision)
    answer = implementation.load(f"fairscale.{name}").unsupported(work, layout, torch.device("cpu"), {})
    assert answer is None if reason is None else answer is not None and reason in answer


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("sharded_ddp", {"reduce_buffer_size": -1}, "reduce_buffer_size must be at least 0, got -1"),
        ("sharded_ddp", {"loss_scaling": "mean"}, "loss_scaling must be one of global_tokens, rank_mean, got 'mean'"),
        ("pipe", {"chunks": 0}, "chunks must be at least 1, got 0"),
        ("pipe", {"num_partitions": 0}, "num_partitions must be at least 1, got 0"),
        ("pipe", {"checkpoint": "all"}, "checkpoint must be one of never, except_last, always, got 'all'"),
        ("pipe", {"partition": "time"}, "partition must be one of uniform, parameters, flops, got 'time'"),
        ("pipe", {"chunks": 1, "checkpoint": "always"}, None),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any], reason: str | None) -> None:
    assert implementation.load(f"fairscale.{name}").refused_options(options) == reason


@pytest.mark.parametrize(
    ("workload", "layout", "options", "words"),
    [
        (GPT, TWO, {"set_to_none": True}, "leave the buffers that are reduced, and are not summed"),
        (GPT, TWO, {"set_to_none": True, "reduce_buffer_size": 0}, None),
        (GPT, Layout(data=1), {"set_to_none": True}, None),
        (GPT, TWO, {"loss_scaling": "rank_mean"}, "each rank divides by its own tokens"),
        ("gpt:size=tiny,text=stdlib,global_batch_size=8", TWO, {"loss_scaling": "rank_mean"}, None),
        (GPT, TWO, {}, None),
    ],
)
def test_options_that_depart_from_the_recipe_say_so(
    workload: str, layout: Layout, options: dict[str, Any], words: str | None
) -> None:
    found = implementation.load("fairscale.sharded_ddp").other_work(models.load(workload), layout, options)
    assert found is None if words is None else found is not None and words in found
