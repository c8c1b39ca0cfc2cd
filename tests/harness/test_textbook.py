"""The textbook's bytes by hand, and what ours send beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness import implementation, models, textbook
from harness.case import Case
from harness.layout import Layout
from harness.measure.predicted_memory import registry
from harness.parameters import LogicalParameter
from harness.result import Result
from harness.workload import in_precision

GPT = "gpt:size=tiny"


def parameter(name: str, num_elements: int, dtype: torch.dtype, *, trainable: bool = True) -> LogicalParameter:
    return LogicalParameter(name=name, shape=(num_elements,), dtype=dtype, trainable=trainable, decayed=True)


@pytest.mark.parametrize(
    ("strategy", "layout", "precision", "num_micro_batches", "num_bytes"),
    [
        # 1,000 trained elements, 4,000 bytes of gradients and as many of parameters; 200 more that are frozen.
        ("data_parallel", Layout(data=4), "fp32", 1, 6000),
        ("data_parallel", Layout(data=4), "fp32", 2, 6000),
        ("zero_1", Layout(data=4), "fp32", 2, 6000),
        ("zero_2", Layout(data=4), "fp32", 1, 6000),
        ("zero_2", Layout(data=4), "fp32", 2, 9000),
        ("zero_3", Layout(data=4), "fp32", 1, 9000 + 2 * 600),
        ("zero_3", Layout(data=4), "fp32", 2, 2 * (9000 + 2 * 600)),
        # fp32 gradients of bf16 parameters: 4,000 bytes and 2,000.
        ("zero_1", Layout(data=2), "bf16_fp32_gradients", 1, 3000),
        # Two replicas of two shards: half of 8,000 within them, and each rank's 2,000 bytes of gradients across.
        ("zero_2", Layout(data=4, shard=2), "fp32", 1, 4000 + 2000),
        ("data_parallel", Layout(), "fp32", 1, None),
        ("data_parallel", Layout(data=2, tensor=2), "fp32", 1, None),
        ("hybrid", Layout(data=2), "fp32", 1, None),
    ],
)
def test_bytes_along_the_data_axis_by_hand(
    strategy: str, layout: Layout, precision: str, num_micro_batches: int, num_bytes: int | None
) -> None:
    workload = in_precision(models.load(f"{GPT},num_micro_batches={num_micro_batches}"), precision)
    dtype = workload.precision.compute
    parameters = [parameter("a", 600, dtype), parameter("b", 400, dtype), parameter("c", 200, dtype, trainable=False)]
    assert textbook.bytes_per_step(strategy, workload, parameters, layout) == num_bytes


def test_no_library_is_loaded_for_it_and_what_cannot_be_loaded_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    load, asked = implementation.load, []

    def loaded(name: str) -> Any:
        asked.append(name)
        if name != "native.tensor":
            raise ImportError(name)
        return load(name)

    monkeypatch.setattr(implementation, "load", loaded)
    workload = models.load(GPT)
    assert textbook.bytes_per_step("tensor_parallel", workload, registry(workload), Layout(tensor=2))
    assert {name.partition(".")[0] for name in asked} == {"native"}
    assert textbook.bytes_per_step("pipeline_parallel", workload, registry(workload), Layout(pipeline=2)) is None


@pytest.mark.parametrize(
    ("name", "layout", "options", "strategy"),
    [
        ("native.ddp", Layout(data=4), {}, "data_parallel"),
        ("native.zero", Layout(data=4), {"stage": 1}, "zero_1"),
        ("native.zero", Layout(data=4, shard=2), {"stage": 2}, "zero_2"),
        ("native.tensor", Layout(tensor=2), {}, "tensor_parallel"),
        ("native.pipeline", Layout(pipeline=2), {}, "pipeline_parallel"),
    ],
)
def test_ours_send_what_the_textbook_says_but_for_padding(
    name: str, layout: Layout, options: dict[str, Any], strategy: str
) -> None:
    workload = models.load(f"{GPT},num_micro_batches=2")
    kind, parameters = implementation.load(name), registry(workload)
    sent = kind.predicted_wire_bytes(workload, parameters, layout, options)
    assert sent == pytest.approx(textbook.bytes_per_step(strategy, workload, parameters, layout), rel=0.01)


def test_results_that_were_written_without_it_get_it() -> None:
    """Compared as what its comparison is named after, where it rivals that."""

    def result(workload: str = GPT, comparison: str = "", role: Any = "peer", **metrics: float) -> Result:
        case = Case(
            workload=workload, implementation="torch.fsdp", layout=Layout(data=2), role=role, comparison=comparison
        )
        rivals = ("zero_3", "zero_2")
        measured = {"x": 1.0, **metrics}
        return Result(case=case, status="ok", strategy="zero_3", comparable_strategies=rivals, metrics=measured)

    gradients = sum(parameter.num_bytes for parameter in registry(models.load(GPT)))
    given = [
        result(),
        result(comparison="zero_2"),
        result(comparison="mine"),
        result("gone.py:build"),
        result(role="floor"),
        result(**{textbook.METRIC: 7.0}),
    ]
    filled = [one.metrics.get(textbook.METRIC) for one in textbook.filled_in(given)]
    assert filled == [1.5 * gradients, gradients, 1.5 * gradients, None, None, 7.0]


def test_a_peer_has_the_textbook_of_the_strategy_whose_peers_it_is_held_against() -> None:
    """One that keeps gathered parameters stands beside stage 2 where that is ours: so does its textbook."""
    ours = Case(workload=GPT, implementation="native.zero", layout=Layout(data=2), options={"stage": 2})
    peer = replace(ours, implementation="torch.fsdp", options={"reshard_after_forward": False}, role="peer")
    rivals, measured = ("zero_3", "zero_2"), {"x": 1.0, textbook.METRIC: 7.0}
    given = [
        Result(case=ours, status="ok", strategy="zero_2", metrics=measured),
        Result(case=peer, status="ok", strategy="zero_3", comparable_strategies=rivals, metrics=measured),
    ]
    gradients = sum(parameter.num_bytes for parameter in registry(models.load(GPT)))
    assert [one.metrics[textbook.METRIC] for one in textbook.filled_in(given)] == [7.0, gradients]


def test_results_that_were_written_without_the_reason_why_they_send_more_get_it() -> None:
    case = Case(workload=GPT, implementation="torch.fsdp", layout=Layout(data=2), role="peer")
    own = Result(case=case, status="ok", strategy="zero_3", metrics={textbook.METRIC: 7.0})
    given = [
        own,
        replace(own, environment={"device": {"kind": "cuda"}}),
        replace(own, beyond_the_textbook="so"),
        replace(own, case=replace(case, implementation="gone.py:Plan")),
    ]
    reasons = [one.beyond_the_textbook for one in textbook.filled_in(given)]
    assert reasons == ["over gloo a reduce-scatter is an all-reduce of twice the bytes", None, "so", None]
