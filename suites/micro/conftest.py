"""What micro-benchmarks share: ranks, the way from their clocks into pytest-benchmark, and where they ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import environment, micro_record
from harness.case import Case, Measurement
from harness.launch import emulated
from harness.launch.emulated import EmulatedNodes
from harness.launch.local import LocalLaunch
from harness.layout import Layout
from harness.measure.timing import slowest_rank
from harness.topology import Topology

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
    """A world of ranks of each size and topology, that take on one operation after another."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._launches: dict[Topology, LocalLaunch] = {}
        self._nodes = ExitStack()

    def benchmark(
        self,
        benchmark: Any,
        layout: Layout,
        *,
        topology: Topology | None = None,
        num_rounds: int = NUM_ROUNDS,
        **options: Any,
    ) -> None:
        """`num_rounds` of an operation, each as long as it took the slowest rank; on several nodes of `topology` these
        are emulated, and it is skipped where they cannot be."""
        case = Case(
            workload="gpt:size=tiny",
            implementation=_OPERATION,
            layout=layout,
            topology=topology,
            options=options,
            measurement=Measurement(parity_steps=0, timed_steps=num_rounds),
        )
        if case.placed.num_nodes > 1 and (reason := emulated.unavailable(case.placed)):
            pytest.skip(reason)
        launch = self._adopted(case)
        launch.command("build")
        launch.command("time_steps", num_steps=_NUM_WARM_UP)
        answers = launch.command("time_steps", num_steps=num_rounds)
        rounds = iter(slowest_rank([answer["step_seconds"] for answer in answers]))

        def one_round() -> None:
            CLOCK.seconds += next(rounds)

        benchmark.pedantic(one_round, rounds=num_rounds, iterations=1)

    def close(self) -> None:
        for launch in self._launches.values():
            launch.close()
        self._nodes.close()

    def _adopted(self, case: Case) -> LocalLaunch:
        topology = case.placed
        launch = self._launches.get(topology)
        if launch is None or not launch.is_alive:
            directory = self._directory / f"world-{len(list(self._directory.iterdir()))}"
            nodes = self._nodes.enter_context(EmulatedNodes(topology)) if topology.num_nodes > 1 else None
            launch = LocalLaunch(case.to_json(), case.world_size, directory, deadline_seconds=120, nodes=nodes)
            self._launches[topology] = launch
        launch.extend_deadline()
        launch.command("adopt", case=case.to_json())
        return launch


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """Beside what pytest-benchmark tells of the machine, which is compared with what was saved: this has the commit."""
    with one_thread():
        output_json[micro_record.ENVIRONMENT] = environment.describe("cpu")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


@contextmanager
def one_thread() -> Iterator[None]:
    """As in a rank."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def with_one_thread() -> Iterator[None]:
    with one_thread():
        yield
