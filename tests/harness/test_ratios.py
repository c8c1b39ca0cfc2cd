from dataclasses import replace
from typing import Any

import pytest

from harness.case import Case
from harness.layout import Layout
from harness.ratios import ratio_rows
from harness.result import Parity, Result
from harness.topology import Topology

HELD = Parity(
    ok=True,
    lane="fp32",
    loss_max_relative=0.0,
    gradient_norm_max_relative=0.0,
    gradient_max_relative=0.0,
    parameter_max_relative=0.0,
    worst_parameter=None,
    first_bad_step=None,
    explanation=None,
    replicas_bit_equal=True,
)


def timed(name: str, role: str, rounds: list[list[float]], **others: Any) -> Result:
    """One rank's step seconds, by round."""
    samples = {"step_seconds": [[s for seconds in rounds for s in seconds]], "steps_per_round": len(rounds[0])}
    case: dict[str, Any] = {"workload": "gpt", "implementation": name, "role": role, "layout": Layout(data=2)}
    case |= others.pop("case", {})
    common = {"status": "ok", "strategy": "ddp", "samples": samples, "parity": HELD}
    return Result(**{"case": Case(**case), **common, **others})


OURS = timed("native", "subject", [[3.0, 3.0], [3.0, 3.0], [6.0, 6.0], [3.0, 3.0]])
FAST = timed("torch", "peer", [[4.0, 4.0], [4.0, 4.0], [4.0, 4.0], [4.0, 4.0]])
SLOW = timed("deepspeed", "peer", [[8.0, 8.0], [8.0, 8.0], [8.0, 8.0], [8.0, 8.0]])
FLOOR = timed("floor", "floor", [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]], strategy="none")


def rows_of(*results: Result) -> dict[str, dict[str, Any]]:
    return {row["implementation"]: row for row in ratio_rows(results)}


def test_ratios_by_hand() -> None:
    rows = rows_of(OURS, FAST, SLOW, FLOOR)
    assert list(rows) == ["native", "torch", "deepspeed"]
    assert rows["native"] == {
        "strategy": "ddp",
        "comparison": "",
        "workload": "gpt",
        "layout": "data=2",
        "topology": "1x2",
        "precision": "fp32",
        "world_size": 2,
        "implementation": "native",
        "role": "subject",
        "best_peer": "torch",
        "best_peer_parity": "ok",
        "median_seconds": 3.0,
        "best_peer_seconds": 4.0,
        "floor_seconds": 2.0,
        "ratio": 0.75,
        "floor_ratio": 1.5,
        "overhead_ratio": 0.5,
        "parity": "ok",
        "other_work": None,
        "in_turns": True,
        "rounds": 4,
        # Rounds 0.75, 0.75, 0.75, 1.5: quartiles 0.75 and 0.75 + 0.75 * 0.75 (Hyndman and Fan's sixth).
        "spread": pytest.approx(0.5625),
    }
    assert (rows["torch"]["ratio"], rows["torch"]["spread"]) == (1.0, 0.0)
    assert (rows["deepspeed"]["ratio"], rows["deepspeed"]["overhead_ratio"]) == (2.0, 3.0)


def test_the_slowest_rank_counts() -> None:
    two_ranks = {"step_seconds": [[1.0, 1.0], [3.0, 5.0]], "steps_per_round": 1}
    assert rows_of(timed("native", "subject", [[1.0]], samples=two_ranks), FAST)["native"]["ratio"] == 1.0


def test_without_a_floor_nothing_is_said_about_it() -> None:
    row = rows_of(OURS, FAST)["native"]
    assert (row["floor_seconds"], row["floor_ratio"], row["overhead_ratio"]) == (None, None, None)


def test_a_peer_that_is_not_above_the_floor_has_no_overhead_to_compare_with() -> None:
    row = rows_of(OURS, FAST, timed("floor", "floor", [[4.0]], strategy="none"))["native"]
    assert (row["floor_ratio"], row["overhead_ratio"]) == (0.75, None)


def test_one_round_has_no_spread() -> None:
    row = rows_of(timed("native", "subject", [[3.0]]), timed("torch", "peer", [[4.0]]))["native"]
    assert (row["rounds"], row["spread"], row["ratio"]) == (1, None, 0.75)


def test_only_like_is_compared_with_like() -> None:
    assert rows_of(OURS) == {}
    for other in (
        {"strategy": "zero"},
        {"case": {"workload": "llama"}},
        {"case": {"precision": "bf16"}},
        {"case": {"layout": Layout(data=4)}},
        {"case": {"topology": Topology(num_nodes=2, ranks_per_node=1)}},
        {"case": {"topology": Topology(num_nodes=2, ranks_per_node=1, delay_ms=5.0)}},
        {"case": {"comparison": "another"}},
    ):
        assert rows_of(OURS, timed("torch", "peer", [[4.0]], **other)) == {}, other


def test_a_failed_case_takes_no_part_but_one_that_diverged_is_shown() -> None:
    crashed = timed("deepspeed", "peer", [[1.0]], status="failed")
    diverged = timed("native", "subject", [[3.0]], status="parity failed")
    rows = rows_of(diverged, FAST, crashed)
    assert list(rows) == ["native", "torch"]
    assert rows["native"]["best_peer"] == "torch"


def test_a_peer_stands_beside_each_strategy_that_it_is_comparable_with() -> None:
    second = timed("native", "subject", [[3.0]] * 4, strategy="zero_2")
    third = timed("native", "subject", [[3.0]] * 4, strategy="zero_3", case={"options": {"stage": 3}})
    peer = timed("torch", "peer", [[6.0]] * 4, strategy="zero_3", comparable_strategies=("zero_3", "zero_2"))
    rows = [(row["strategy"], row["role"], row["ratio"]) for row in ratio_rows([second, third, peer])]
    assert rows == [
        ("zero_2", "subject", 0.5),
        ("zero_2", "peer", 1.0),
        ("zero_3", "subject", 0.5),
        ("zero_3", "peer", 1.0),
    ]


def test_a_peer_that_trains_another_model_is_shown_and_is_nobodys_best() -> None:
    diverged = timed("fairscale", "peer", [[1.0]] * 4, status="parity failed")
    rows = rows_of(OURS, FAST, diverged)
    assert rows["native"]["best_peer"] == "torch"
    assert {name: row["parity"] for name, row in rows.items()} == {"native": "ok", "torch": "ok", "fairscale": "failed"}
    assert rows_of(OURS, diverged) == {}


def test_a_peer_that_does_other_work_is_shown_and_is_nobodys_best_whatever_its_parity() -> None:
    clipped = timed("deepspeed", "peer", [[1.0]] * 4, other_work="gradients are clipped at 1")
    rows = rows_of(OURS, FAST, clipped)
    assert rows["native"]["best_peer"] == "torch"
    assert rows["deepspeed"]["other_work"] == "gradients are clipped at 1"
    assert rows_of(OURS, clipped) == {}


def test_parity_that_nobody_checked_is_not_called_ok() -> None:
    rows = rows_of(OURS, timed("torch", "peer", [[4.0]] * 4, parity=None))
    assert {name: row["parity"] for name, row in rows.items()} == {"native": "ok", "torch": "not checked"}
    assert rows["native"]["best_peer_parity"] == "not checked"


@pytest.mark.parametrize(("starts", "in_turns"), [((100.0, 100.1, 100.2), True), ((100.0, 130.5, 162.0), False)])
def test_rounds_have_a_spread_only_where_they_took_turns(starts: tuple[float, ...], in_turns: bool) -> None:
    """A case that took 30 seconds: in an interleaved suite the others began before it was over."""
    cases = [
        replace(one, started=started, duration_seconds=30.0)
        for one, started in zip((OURS, FAST, FLOOR), starts, strict=True)
    ]
    row = rows_of(*cases)["native"]
    assert (row["in_turns"], row["ratio"], row["rounds"]) == (in_turns, 0.75, 4)
    assert (row["spread"] is None) == (not in_turns)
