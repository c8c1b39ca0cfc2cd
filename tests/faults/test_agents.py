"""torchrun's agents that are killed: their workers, orphans in sessions of their own, would train on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from harness.engines import Torchrun
from tests.faults.conftest import Run, Struck, record, victim

pytestmark = pytest.mark.faults


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("rank", [1, 0])
def test_an_agent_that_is_killed(rank: int, run: Run) -> None:
    def strike(struck: Struck) -> None:
        worker = struck.pid(rank)
        assert os.getsid(worker) == worker, "a session of its own"
        os.kill(parent_of(worker), signal.SIGKILL)

    result, seconds = run(victim(), strike, engine=Torchrun(1, within_slurm=False))
    assert (result.status, result.culprit) == ("failed", None)
    assert result.reason == f"the agent of node {rank} was killed by SIGKILL during time_steps"
    record(f"torchrun's agent of node {rank} killed", f"failed: the agent of node {rank} was killed", seconds, 30.0)
