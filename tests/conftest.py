"""Ranks for tests: started in one way only (the local launcher), kept for the session, one world of each size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import tracking
from harness.case import Case, Measurement
from harness.judging import held_against_reference
from harness.launch.failure import LaunchFailed
from harness.launch.local import LocalLaunch
from harness.layout import Layout
from harness.rank_records import assemble
from harness.references import References
from harness.result import Parity
from harness.trajectory import Trajectory

PARITY_STEPS = 3


class Worlds:
    """Worlds of ranks that take on one case after another."""

    def __init__(self, directory: Path, references: References) -> None:
        self._directory = directory
        self.references = references
        self._launches: dict[int, LocalLaunch] = {}
        self._num_launches = 0

    def adopt(self, case: Case) -> LocalLaunch:
        """The world of the case's size, with the case built on it."""
        launch = self._launches.get(case.world_size)
        weights = self.references.weights(case.workload)
        try:
            if launch is None:
                logs = self._directory / f"world-{self._num_launches}"
                self._num_launches += 1
                launch = LocalLaunch(case.to_json(), case.world_size, logs, weights=weights, deadline_seconds=120)
                self._launches[case.world_size] = launch
            launch.extend_deadline()
            launch.command("adopt", case=case.to_json(), weights=str(weights))
            launch.command("build")
        except LaunchFailed:
            self._drop(case.world_size)
            raise
        return launch

    def trajectory(self, case: Case, num_steps: int = PARITY_STEPS) -> Trajectory:
        """What the case's first steps leave behind."""
        launch = self.adopt(case)
        tensors = self._directory / "tensors.pt"
        try:
            records = launch.command("parity", num_steps=num_steps, path=str(tensors))
        except LaunchFailed:
            self._drop(case.world_size)
            raise
        return assemble(records, tensors, case.layout)

    def parity(self, case: Case) -> Parity:
        """The case held against its reference."""
        trajectory = self.trajectory(case, case.measurement.parity_steps)
        return held_against_reference(trajectory, case, self.references)

    def close(self) -> None:
        for size in list(self._launches):
            self._drop(size)

    def _drop(self, world_size: int) -> None:
        if world_size in self._launches:
            self._launches.pop(world_size).kill()


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    directory = tmp_path_factory.mktemp("worlds")
    references = References(directory, directory / "logs")
    worlds = Worlds(directory, references)
    yield worlds
    worlds.close()
    references.close()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with MLflow's tables, which take seconds to create."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    with tracking._client(f"sqlite:///{file}"):
        pass
    return file


class Instrumented:
    """Instrumented ranks, one world of each size, that take on one case after another."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._launches: dict[int, LocalLaunch] = {}
        self._num_launches = 0

    def adopt(self, case: Case) -> LocalLaunch:
        """The world of the case's size, with the case to be built; a new one where the last has failed."""
        launch = self._launches.get(case.world_size)
        if launch is None or not launch.is_alive:
            logs = self._directory / f"world-{self._num_launches}"
            self._num_launches += 1
            launch = LocalLaunch(case.to_json(), case.world_size, logs, instrumented=True, deadline_seconds=120)
            self._launches[case.world_size] = launch
        launch.extend_deadline()
        launch.command("adopt", case=case.to_json())
        return launch

    def close(self) -> None:
        for launch in self._launches.values():
            launch.close()


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instrumented]:
    """Not kept for the session: figures, unlike trajectories, do not bear what other families leave in a process."""
    ranks = Instrumented(tmp_path_factory.mktemp("instrumented"))
    yield ranks
    ranks.close()


def parity_case(workload: str, implementation: str, world_size: int, **others: Any) -> Case:
    """A case that is only held against its reference."""
    return Case(
        workload=workload,
        implementation=implementation,
        layout=others.pop("layout", None) or Layout(data=world_size),
        measurement=Measurement(parity_steps=PARITY_STEPS, timed_steps=0),
        **others,
    )
