"""Which cases are compared with which, and what their times are held against."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.case import Case
from harness.comparison import comparisons, read_run, read_runs
from harness.layout import Layout
from harness.result import Result, append
from harness.topology import Topology

MIB = 2**20


def result(
    name: str = "native.ddp", layout: Layout | None = None, seconds: float | None = 0.2, **fields: Any
) -> Result:
    in_case = {key: fields.pop(key) for key in ("options", "role", "precision", "topology") if key in fields}
    case = Case(workload="gpt:size=17m", implementation=name, layout=layout or Layout(data=2), **in_case)
    metrics = {} if seconds is None else {"step.median_seconds": seconds}
    return Result(**{"case": case, "status": "ok", "metrics": metrics | fields.pop("metrics", {}), **fields})


FLOOR = result("native.floor", role="floor", seconds=0.1)
REFERENCE = result("reference", Layout(), role="reference", seconds=0.3)


def test_cases_of_one_work_and_layout_stand_in_one_table_in_the_order_of_the_run() -> None:
    four = result(layout=Layout(data=4))
    cut = result("native.zero", Layout(data=4, shard=2), options={"stage": 3})
    exact = result(precision="fp64")
    apart = result(topology=Topology(num_nodes=2, ranks_per_node=1, delay_ms=5))
    found = comparisons([REFERENCE, FLOOR, result(), four, exact, apart, cut])
    assert [(each.title, [row.name for row in each.rows]) for each in found] == [
        ("`gpt:size=17m`, data=2, fp32", ["native.floor (floor)", "native.ddp"]),
        ("`gpt:size=17m`, data=4, fp32", ["native.ddp", "native.zero stage=3 shard=2"]),
        ("`gpt:size=17m`, data=2, fp64", ["native.ddp"]),
        ("`gpt:size=17m`, data=2, 2x1 +5 ms, fp32", ["native.ddp"]),
    ]
    assert [row.name for row in found[0].rivals] == ["native.ddp"]


def test_times_are_held_against_the_fastest_floor_of_the_same_layout() -> None:
    slow_floor = result("native.ddp", role="floor", options={"reduction": "none"}, seconds=0.16)
    (found,) = comparisons([slow_floor, FLOOR, result(), result("torch.ddp", seconds=None, metrics={"x": 1.0})])
    assert found.baseline == "floor"
    assert [row.step_ratio for row in found.rows] == [pytest.approx(1.6), 1.0, 2.0, None]


def test_without_a_floor_for_every_layout_times_are_held_against_the_fastest_of_their_own() -> None:
    cut = Layout(data=2, shard=1)
    (found,) = comparisons([FLOOR, result(), result("a.b", cut, 0.4), result("c.d", cut, 0.5)])
    assert found.baseline == "fastest"
    assert [row.step_ratio for row in found.rows] == pytest.approx([1.0, 2.0, 1.0, 1.25])


def test_states_are_the_sum_of_what_is_known_of_them() -> None:
    metrics = {f"memory.{name}": n * MIB for n, name in enumerate(("parameter_bytes", "gradient_bytes"), start=1)}
    ((row,),) = (each.rows for each in comparisons([result(metrics=metrics)]))
    assert row.state_bytes == 3 * MIB
    assert row.predicted_state_bytes is None


def test_what_was_not_measured_has_no_row() -> None:
    failed = replace(result("torch.ddp"), status="failed", reason="gone")
    unsupported = result("torch.zero", seconds=None, status="unsupported")
    diverged = result("native.zero", status="parity failed")
    (found,) = comparisons([result(), failed, unsupported, diverged])
    assert [row.name for row in found.rows] == ["native.ddp", "native.zero"]


def test_a_run_is_named_by_its_directory_or_by_its_results_file(tmp_path: Path) -> None:
    append(tmp_path, result())
    for path in (tmp_path, tmp_path / "results.jsonl"):
        assert [found.case.id for found in read_run(path)] == [result().case.id]


def test_several_runs_are_read_as_one_unless_they_share_a_comparison(tmp_path: Path) -> None:
    for name, workload in (("small", "gpt:size=tiny"), ("large", "gpt:size=17m"), ("again", "gpt:size=tiny")):
        (tmp_path / name).mkdir()
        measured = result()
        append(tmp_path / name, replace(measured, case=replace(measured.case, workload=workload)))
    found = read_runs([tmp_path / "small", tmp_path / "large"])
    assert [each.case.workload for each in found] == ["gpt:size=tiny", "gpt:size=17m"]
    with pytest.raises(ValueError, match=r"again: expected other comparisons than in .*small, got `gpt:size=tiny`"):
        read_runs([tmp_path / "small", tmp_path / "again"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere: expected a results directory or its results.jsonl, got neither"),
        ("notes.txt", "notes.txt: expected a results directory or its results.jsonl, got neither"),
        ("empty", "empty: expected a results directory with results.jsonl, found none"),
        ("garbled/results.jsonl", "line 1: not a result"),
        ("garbled_to_the_end/results.jsonl", "expected at least one case that was measured .* got none in 0"),
        ("alone", "expected at least one case that was measured beside the reference, got none in 1"),
    ],
)
def test_what_is_no_run_is_refused_with_what_was_expected(name: str, message: str, tmp_path: Path) -> None:
    for directory in ("empty", "garbled", "garbled_to_the_end", "alone"):
        (tmp_path / directory).mkdir()
    (tmp_path / "notes.txt").write_text("{}")
    (tmp_path / "garbled/results.jsonl").write_text("no JSON\n")
    (tmp_path / "garbled_to_the_end/results.jsonl").write_text("no JSON")
    append(tmp_path / "alone", REFERENCE)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path / name)


def test_a_case_is_held_against_the_peers_of_the_strategy_as_which_it_is_compared() -> None:
    """A sharder that keeps gathered parameters stands beside stage 2 too: there the best of that stage is its best."""
    ours = result("native.zero", strategy="zero_2", seconds=0.2)
    gathered = result("torch.fsdp", role="peer", strategy="zero_3", comparable_strategies=("zero_3", "zero_2"))
    best = result("fairscale.sharded_ddp", role="peer", strategy="zero_2", seconds=0.1)
    (found,) = comparisons([ours, gathered, best])
    assert [row.peer_ratio for row in found.rows] == [2.0, 2.0, 1.0]
    # Beside stage 3 it is what it is.
    third = result("native.zero", strategy="zero_3", seconds=0.4, options={"stage": 3})
    (found,) = comparisons([third, gathered, best])
    assert [row.peer_ratio for row in found.rows] == [2.0, 1.0, 1.0]


def test_nothing_is_held_against_a_peer_that_trains_otherwise_or_does_other_work() -> None:
    subject = result(strategy="ddp", seconds=0.2)
    peer = result("torch.ddp", role="peer", strategy="ddp", seconds=0.4)
    clipped = result("deepspeed.zero", role="peer", strategy="ddp", seconds=0.1, other_work="clipped at 1")
    parted = result("fairscale.oss", role="peer", strategy="ddp", seconds=0.1, status="parity failed")
    (found,) = comparisons([subject, peer, clipped, parted])
    assert found.rows[0].peer_ratio == 0.5
    assert found.baseline == "fastest"
    assert [row.step_ratio for row in found.rows] == [1.0, 2.0, 0.5, 0.5]
