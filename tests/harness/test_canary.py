"""The canary: figures from rounds worked out by hand, and real ranks."""

from __future__ import annotations

import pytest

from harness import canary
from tests.conftest import Worlds, parity_case


def test_the_slowest_rank_is_the_round_and_waiting_is_no_all_reduce() -> None:
    warm_up = [(9.0, 9.0)] * canary.NUM_WARM_UP_ROUNDS
    first = [*warm_up, (1.0, 0.75), (1.0, 0.5), (2.0, 0.25)]
    second = [*warm_up, (1.5, 0.25), (1.0, 0.75), (1.0, 1.25)]
    assert canary.figures([first, second]) == {
        "seconds": 1.75,  # of 1.75, 1.75, 2.25
        "matmul_seconds": 1.5,  # of 1.5, 1.0, 2.0
        "all_reduce_seconds": 0.25,  # of 0.25, 0.5, 0.25
        "world_size": 2.0,
    }


def test_ranks_measure_it(worlds: Worlds) -> None:
    launch = worlds.adopt(parity_case("gpt", "native.ddp", 2))
    rounds = launch.command("measure_canary", num_rounds=canary.NUM_WARM_UP_ROUNDS + 3)
    assert [len(of_rank) for of_rank in rounds] == [13, 13]
    found = canary.figures(rounds)
    # 2 * 512^3 operations take a core between some 0.3 ms and, with many others on it, seconds.
    assert 1e-4 < found["matmul_seconds"] < found["seconds"] < 10
    assert found["all_reduce_seconds"] > 0


def test_measure_takes_its_ranks_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "NUM_ROUNDS", 2)
    monkeypatch.setattr(canary, "NUM_WARM_UP_ROUNDS", 1)
    assert canary.measure().keys() == {"seconds", "matmul_seconds", "all_reduce_seconds", "world_size"}
