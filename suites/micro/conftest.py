"""What micro-benchmarks share: ranks, and the way from their clocks into pytest-benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.case import Case, Measurement
from harness.launch.local import LocalLaunch
from harness.layout import Layout
from harness.measure.timing import slowest_rank

_OPERATION = f"{Path(__file__).with_name('operations.py')}:Operation"
_NUM_WARM_UP = 5
NUM_ROUNDS = 30


class RankClock:
    """The clock of benchmarks in ranks: it goes on by what the slowest of them took, and stands still otherwise."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = RankClock()
in_ranks = pytest.mark.benchmark(timer=CLOCK)
"""Marks a benchmark that measures inside ranks, through the fixture `ranks`."""


class Ranks:
    """A world of ranks of each size, that take on one operation after another."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._launches: dict[int, LocalLaunch] = {}

    def benchmark(self, benchmark: Any, layout: Layout, **options: Any) -> None:
        """NUM_ROUNDS of an operation, each as long as it took the slowest rank."""
        case = Case(
            workload="gpt:size=tiny",
            implementation=_OPERATION,
            layout=layout,
            options=options,
            measurement=Measurement(parity_steps=0, timed_steps=NUM_ROUNDS),
        )
        launch = self._adopted(case)
        launch.command("build")
        launch.command("time_steps", num_steps=_NUM_WARM_UP)
        answers = launch.command("time_steps", num_steps=NUM_ROUNDS)
        rounds = iter(slowest_rank([answer["step_seconds"] for answer in answers]))

        def one_round() -> None:
            CLOCK.seconds += next(rounds)

        benchmark.pedantic(one_round, rounds=NUM_ROUNDS, iterations=1)

    def close(self) -> None:
        for launch in self._launches.values():
            launch.close()

    def _adopted(self, case: Case) -> LocalLaunch:
        launch = self._launches.get(case.world_size)
        if launch is None or not launch.is_alive:
            directory = self._directory / f"world-{len(list(self._directory.iterdir()))}"
            launch = LocalLaunch(case.to_json(), case.world_size, directory, deadline_seconds=120)
            self._launches[case.world_size] = launch
        launch.extend_deadline()
        launch.command("adopt", case=case.to_json())
        return launch


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a rank."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
