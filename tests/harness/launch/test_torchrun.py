"""Ranks that torchrun's agents start: the same commands and the same failures as local ones, and nothing left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.case import Case
from harness.launch.failure import LaunchFailed
from harness.launch.torchrun import TorchrunLaunch, _killed_under_srun, local_agents
from harness.launch.watched import Launch
from harness.layout import Layout
from harness.placement import seats
from harness.topology import Topology
from tests.harness.launch.test_local import FAULTY, WORKLOAD, until_gone

pytestmark = pytest.mark.cluster

TWO_NODES = Topology(num_nodes=2, ranks_per_node=1)


def launch(fault: str, directory: Path, topology: Topology = TWO_NODES) -> TorchrunLaunch:
    case = Case(workload=WORKLOAD, implementation=f"{FAULTY}:{fault}", layout=Layout(data=topology.world_size))
    return TorchrunLaunch(
        case.to_json(), topology, directory, agents=local_agents(topology, sys.executable), deadline_seconds=60.0
    )


def agents_of(ranks: TorchrunLaunch) -> list[int]:
    return [agent.pid for agent in ranks._agents]


def nodes_of(ranks: TorchrunLaunch) -> list[int]:
    """By rank, as torchrun tells the ranks."""
    return [rank.process.hello.node for rank in ranks._ranks]  # type: ignore[attr-defined]


def test_ranks_answer_in_order_and_sit_where_the_topology_says(tmp_path: Path) -> None:
    topology = Topology(num_nodes=2, ranks_per_node=2, placement="scattered")
    with launch("Sound", tmp_path, topology) as ranks:
        everyone = [*ranks.pids, *agents_of(ranks)]
        assert nodes_of(ranks) == list(seats(Layout(data=4), topology).node_of_rank) == [0, 1, 0, 1]
        ranks.command("build")
        answers = ranks.command("time_steps", num_steps=3)
        assert [len(answer["step_seconds"]) for answer in answers] == [3] * 4
        assert ranks.is_alive
    assert until_gone(everyone, 1.0) == []


def failure_of(
    fault: str, directory: Path, meddle: Callable[[TorchrunLaunch], None] | None = None, seconds: float | None = None
) -> LaunchFailed:
    with launch(fault, directory) as ranks:
        everyone = [*ranks.pids, *agents_of(ranks)]
        assert nodes_of(ranks) == [0, 1], "contiguous"
        with pytest.raises(LaunchFailed) as raised:
            ranks.command("build")
            if seconds is not None:
                ranks._seconds_left = seconds
            if meddle:
                threading.Timer(0.7, meddle, [ranks]).start()
            ranks.command("time_steps", num_steps=100 if meddle else 3)
        assert until_gone(everyone, 1.0) == []
    assert "\n" not in raised.value.reason
    return raised.value


def send(number: int, pids: Callable[[TorchrunLaunch], list[int]]) -> Callable[[TorchrunLaunch], None]:
    return lambda ranks: os.kill(pids(ranks)[1], number)


def test_a_rank_that_raises_is_named(tmp_path: Path) -> None:
    failure = failure_of("Raises", tmp_path)
    assert (failure.status, failure.culprit) == ("failed", 1)
    assert failure.reason == "rank 1: ValueError: the third bucket"


def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    failure = failure_of("Slow", tmp_path, send(signal.SIGKILL, lambda ranks: ranks.pids))
    assert (failure.status, failure.culprit) == ("failed", 1)
    assert failure.reason.startswith("rank 1 was killed by SIGKILL during time_steps")


def test_a_rank_that_is_stopped_is_named_at_the_deadline(tmp_path: Path) -> None:
    failure = failure_of("Slow", tmp_path, send(signal.SIGSTOP, lambda ranks: ranks.pids), seconds=6.0)
    assert (failure.status, failure.culprit) == ("timed out", 1)
    assert "rank 1 is stopped" in failure.reason


def test_an_agent_that_is_killed_takes_its_ranks_along_and_is_named(tmp_path: Path) -> None:
    began = time.monotonic()
    failure = failure_of("Slow", tmp_path, send(signal.SIGKILL, agents_of))
    assert time.monotonic() - began < 45
    assert (failure.status, failure.culprit) == ("failed", None)
    assert failure.reason == "the agent of node 1 was killed by SIGKILL during time_steps"


@pytest.mark.parametrize(
    ("command", "status", "reason"),
    [
        ("exit 3", "failed", "an agent left with exit code 3: 0 of 2 ranks on 2 nodes came"),
        ("sleep 60", "timed out", "not all ranks joined in 1 s: 0 of 2 ranks on 2 nodes came"),
    ],
)
def test_ranks_that_do_not_come_are_counted(command: str, status: str, reason: str, tmp_path: Path) -> None:
    case = Case(workload=WORKLOAD, implementation=f"{FAULTY}:Sound", layout=Layout(data=2))
    with pytest.raises(LaunchFailed) as raised:
        TorchrunLaunch(
            case.to_json(),
            TWO_NODES,
            tmp_path,
            agents=lambda module: [["sh", "-c", f"echo no such host; {command}"]],
            join_seconds=1.0,
        )
    assert (raised.value.status, raised.value.reason) == (status, reason)
    assert "no such host" in (raised.value.traceback or "")


@pytest.mark.parametrize(
    ("first", "node"),
    [
        ("srun: error: n1: task 1: Killed", "n1"),
        ("srun: error: n1: task 1: Exited with exit code 1", None),  # one of its ranks has failed
    ],
)
def test_of_agents_under_srun_the_first_that_was_killed_is_named(first: str, node: str | None) -> None:
    """With --kill-on-bad-exit srun kills the others, too."""
    after = "srun: Terminating StepId=1.0\nsrun: error: n0: task 0: Killed\n"
    assert _killed_under_srun(f"[W] a warning of torch\n{first}\n{after}") == node


def test_it_is_a_launch_like_any_other() -> None:
    assert issubclass(TorchrunLaunch, Launch)
