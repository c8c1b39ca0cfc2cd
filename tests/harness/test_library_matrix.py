"""Strategies x libraries: each library's best setting beside the best peer, or why there is none."""

from __future__ import annotations

from typing import Any

import pytest

from harness import library_matrix
from harness.case import Case
from harness.layout import Layout
from harness.library_matrix import Cell, Line, columns, matrix
from harness.result import Result
from harness.topology import Topology
from impls.native.ddp import NativeDataParallel
from tests.harness.test_ratios import HELD


def result(name: str, role: str, seconds: float | None, strategy: str = "zero_2", **fields: Any) -> Result:
    case: dict[str, Any] = {"workload": "gpt", "implementation": name, "role": role, "layout": Layout(data=2)}
    case |= fields.pop("case", {})
    metrics = {} if seconds is None else {"step.median_seconds": seconds}
    common = {"status": "ok", "strategy": strategy, "metrics": metrics, "parity": HELD}
    return Result(**{"case": Case(**case), **common, **fields})


OURS = [result("native.zero", "subject", 0.3), result("native.zero", "subject", 0.2, case={"options": {"a": 1}})]
GATHERED = {"options": {"reshard_after_forward": False}}
PEER = result("torch.fsdp", "peer", 0.4, "zero_3", comparable_strategies=("zero_3", "zero_2"))


def texts(line: Line) -> dict[str, str]:
    return {name: cell.text for name, cell in line.cells.items()}


def test_the_fastest_setting_of_each_library_counts() -> None:
    (line,) = matrix([*OURS, PEER, result("deepspeed.zero", "peer", 0.8)])
    assert (line.strategy, line.work) == ("zero_2", "`gpt`, data=2, fp32")
    assert texts(line) == {"native": "200 ms (0.5)", "torch": "400 ms (1.00)", "deepspeed": "800 ms (2.00)"}


def test_what_trains_another_model_or_nothing_has_no_time() -> None:
    parted = result("fairscale.sharded_ddp", "peer", 0.1, status="parity failed")
    missing = result("deepspeed.zero", "peer", None, "", status="unavailable", reason="no compiler")
    (line,) = matrix([*OURS, PEER, parted, missing])
    assert line.cells["torch"] == Cell(text="400 ms (1.00)")
    assert line.cells["fairscale"] == Cell(text="parity failed")
    assert line.cells["deepspeed"] == Cell(text="unavailable")


def test_floors_and_references_are_no_libraries() -> None:
    floor = result("elsewhere.floor", "floor", 0.1, "none")
    assert columns([*OURS, PEER, floor]) == ["native", "torch"]
    assert matrix([*OURS, floor]) == []
    assert matrix([*OURS, result("torch.ddp", "peer", 0.4, "data_parallel")]) == []


def test_other_work_has_no_time_and_an_unchecked_one_says_so() -> None:
    other = result("deepspeed.zero", "peer", 0.1, other_work="gradients are clipped at 1")
    unchecked = result("fairscale.sharded_ddp", "peer", 0.5, parity=None)
    (line,) = matrix([*OURS, PEER, other, unchecked])
    assert texts(line) == {
        "native": "200 ms (0.5)",
        "torch": "400 ms (1.00)",
        "deepspeed": "other work",
        "fairscale": "500 ms (1.25), parity not checked",
    }


def test_what_shares_memory_stands_apart_from_the_process_group() -> None:
    shared = {"options": {"stage": 2, "transport": "shared_memory"}}
    ours = [
        result("native.zero", "subject", 0.3, case={"options": {"stage": 2}}),
        result("native.zero", "subject", 0.2, case=shared),
    ]
    (line,) = matrix([*ours, PEER])
    assert line.cells == {
        "native, process group": Cell(text="300 ms (0.75)"),
        "native, shared memory": Cell(text="200 ms (0.5)"),
        "torch": Cell(text="400 ms (1.00)"),
    }
    # A pipeline has one transport: its line has a cell in one of the two.
    piped = [result(f"{of}.pipeline", role, 1.0, "pp") for of, role in (("native", "subject"), ("torch", "peer"))]
    assert texts(matrix([*ours, PEER, *piped])[1])["native, shared memory"] == "-"
    # Where ranks cannot share memory it was the process group's.
    fell_back = result(
        "native.zero", "subject", 0.2, case=shared, environment={"facts": {"transport": "process_group"}}
    )
    assert columns([fell_back, PEER]) == ["native", "torch"]


def test_a_setting_that_is_not_the_default_is_told_but_for_what_the_table_says() -> None:
    ours = result("native.zero", "subject", 0.3, case={"options": {"stage": 2}})
    peer = result("torch.fsdp", "peer", 0.4, "zero_3", comparable_strategies=("zero_3", "zero_2"), case=GATHERED)
    (line,) = matrix([ours, peer])
    assert line.cells["native"].setting == ""
    assert line.cells["torch"] == Cell(text="400 ms (1.00)", setting="torch.fsdp reshard_after_forward=False")
    # Where the line's strategy is another the stage is an option like any.
    third = {"strategy": "zero_3", "comparable_strategies": ("zero_3", "zero_2"), "case": {"options": {"stage": 3}}}
    (line,) = matrix([ours, result("deepspeed.zero", "peer", 0.4, **third)])
    assert line.cells["deepspeed"].setting == "deepspeed.zero stage=3"
    piped = result("deepspeed.pipeline", "peer", 0.4, "pipeline_parallel", case={"options": {"stage": 1}})
    (line,) = matrix([result("native.pipeline", "subject", 0.3, "pipeline_parallel"), piped])
    assert line.cells["deepspeed"].setting == "deepspeed.pipeline stage=1"


def test_what_is_given_as_it_is_by_itself_has_no_letter() -> None:
    def of(name: str, strategy: str, **options: Any) -> list[Result]:
        subject = result("native.zero", "subject", 0.3, strategy)
        return [subject, result(name, "peer", 0.4, strategy, case={"options": options})]

    def setting(results: list[Result]) -> str:
        return matrix(results)[0].cells[results[1].case.implementation.partition(".")[0]].setting

    assert setting(of("torch.fsdp", "zero_3", reshard_after_forward=True)) == ""
    assert setting(of("torch.fsdp", "zero_3", reshard_after_forward=True, blocks_per_group=2)) == (
        "torch.fsdp blocks_per_group=2"
    )
    # Of one that cannot be loaded nobody knows that.
    assert setting(of("gone.fsdp", "zero_3", reshard_after_forward=True)) == "gone.fsdp reshard_after_forward=True"
    ours = result("native.pipeline", "subject", 0.3, "pp", case={"options": {"schedule": "1f1b"}})
    assert matrix([ours, result("torch.pipeline", "peer", 0.4, "pp")])[0].cells["native"].setting == ""


def test_what_options_mean_the_implementation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under whatever names: `way` is its transport, `depth` decides its strategy."""

    class Own(NativeDataParallel):
        transport_option, strategy_option = "way", "depth"

        def __init__(self, *, way: str = "process_group", depth: int = 0, **_: Any) -> None: ...

    monkeypatch.setattr(library_matrix, "_kind", {"own.zero": Own}.get)
    shared = {"options": {"way": "shared_memory", "depth": 2}}
    ours = [
        result("own.zero", "subject", 0.3, case={"options": {"depth": 2}}),
        result("own.zero", "subject", 0.2, case=shared),
    ]
    (line,) = matrix([*ours, PEER])
    assert line.cells["own, process group"] == Cell(text="300 ms (0.75)")
    assert line.cells["own, shared memory"] == Cell(text="200 ms (0.5)")


def test_lines_that_differ_by_link_or_comparison_alone_say_so() -> None:
    def both(**case: Any) -> list[Result]:
        return [result("native.zero", "subject", 0.3, case=case), result("torch.fsdp", "peer", 0.4, case=case)]

    slow = Topology(num_nodes=2, ranks_per_node=1, link_mbits=200)
    assert [line.work for line in matrix([*both(), *both(topology=slow)])] == [
        "`gpt`, data=2, fp32",
        "`gpt`, data=2, 2x1 at 200 Mbit/s, fp32",
    ]
    assert [line.work for line in matrix([*both(comparison="early"), *both(comparison="late")])] == [
        "`gpt`, data=2, fp32, early",
        "`gpt`, data=2, fp32, late",
    ]
    assert [line.work for line in matrix(both(comparison="zero_2"))] == ["`gpt`, data=2, fp32"]
