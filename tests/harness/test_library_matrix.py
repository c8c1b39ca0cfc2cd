"""Strategies x libraries: each library's best setting beside the best peer, or why there is none."""

from __future__ import annotations

from typing import Any

from harness.case import Case
from harness.layout import Layout
from harness.library_matrix import libraries, matrix
from harness.result import Result
from tests.harness.test_ratios import HELD


def result(name: str, role: str, seconds: float | None, strategy: str = "zero_2", **fields: Any) -> Result:
    case: dict[str, Any] = {"workload": "gpt", "implementation": name, "role": role, "layout": Layout(data=2)}
    case |= fields.pop("case", {})
    metrics = {} if seconds is None else {"step.median_seconds": seconds}
    common = {"status": "ok", "strategy": strategy, "metrics": metrics, "parity": HELD}
    return Result(**{"case": Case(**case), **common, **fields})


OURS = [result("native.zero", "subject", 0.3), result("native.zero", "subject", 0.2, case={"options": {"a": 1}})]
PEER = result("torch.fsdp", "peer", 0.4, "zero_3", comparable_strategies=("zero_3", "zero_2"))


def test_the_fastest_setting_of_each_library_counts() -> None:
    (line,) = matrix([*OURS, PEER, result("deepspeed.zero", "peer", 0.8)])
    assert (line.strategy, line.work) == ("zero_2", "`gpt`, data=2, fp32")
    assert line.cells == {"native": "200 ms (0.5)", "torch": "400 ms (1.00)", "deepspeed": "800 ms (2.00)"}


def test_what_trains_another_model_or_nothing_has_no_time() -> None:
    parted = result("fairscale.sharded_ddp", "peer", 0.1, status="parity failed")
    missing = result("deepspeed.zero", "peer", None, "", status="unavailable", reason="no compiler")
    (line,) = matrix([*OURS, PEER, parted, missing])
    assert line.cells["torch"] == "400 ms (1.00)"
    assert line.cells["fairscale"] == "parity failed"
    assert line.cells["deepspeed"] == "unavailable"


def test_floors_and_references_are_no_libraries() -> None:
    floor = result("elsewhere.floor", "floor", 0.1, "none")
    assert libraries([*OURS, PEER, floor]) == ["native", "torch"]
    assert matrix([*OURS, floor]) == []
    assert matrix([*OURS, result("torch.ddp", "peer", 0.4, "data_parallel")]) == []


def test_other_work_has_no_time_and_an_unchecked_one_says_so() -> None:
    other = result("deepspeed.zero", "peer", 0.1, other_work="gradients are clipped at 1")
    unchecked = result("fairscale.sharded_ddp", "peer", 0.5, parity=None)
    (line,) = matrix([*OURS, PEER, other, unchecked])
    assert line.cells["native"] == "200 ms (0.5)"
    assert line.cells["deepspeed"] == "other work"
    assert line.cells["fairscale"] == "500 ms (1.25), parity not checked"
