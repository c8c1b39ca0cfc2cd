"""Links between emulated nodes that go down, for good and for a moment."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace

import pytest

from harness.launch import emulated
from harness.launch.timeouts import BARRIER_SECONDS, ON_ONE_MACHINE
from harness.topology import Topology
from tests.faults.conftest import Run, Struck, record, victim

pytestmark = pytest.mark.faults

TWO_BY_TWO = Topology(num_nodes=2, ranks_per_node=2, link_mbits=200.0)


@pytest.fixture(autouse=True)
def _where_nodes_can_be_emulated() -> None:
    if reason := emulated.unavailable(TWO_BY_TWO):
        pytest.skip(reason)


def set_link(struck: Struck, state: str) -> None:
    """Of the second node."""
    network = ["nsenter", "--net", "--target", str(struck.pid(3))]
    subprocess.run([*network, "ip", "link", "set", emulated.INTERFACE, state], check=True, timeout=20)


def test_a_link_that_goes_down(run: Run) -> None:
    result, seconds = run(victim(topology=TWO_BY_TWO), lambda struck: set_link(struck, "down"))
    assert (result.status, result.culprit) == ("timed out", 2), result.reason
    assert (result.reason or "").startswith("rank 0 cannot reach rank 2 and rank 3, though all are alive: is the link")
    bound = ON_ONE_MACHINE.least_seconds + BARRIER_SECONDS + 15.0
    record("link down", "timed out: rank 0 cannot reach rank 2 and rank 3, though all are alive", seconds, bound)


@pytest.mark.parametrize("delay_ms", [0.0, 1.0])
def test_a_link_that_is_away_for_four_seconds_does_no_harm(delay_ms: float, run: Run) -> None:
    topology = replace(TWO_BY_TWO, delay_ms=delay_ms)
    if reason := emulated.unavailable(topology):
        pytest.skip(reason)

    def flap(struck: Struck) -> None:
        set_link(struck, "down")
        time.sleep(4.0)
        set_link(struck, "up")

    result, _ = run(victim(topology=topology, timed_steps=150), flap)
    assert (result.status, result.reason) == ("ok", None)
    assert result.metrics["step.max_seconds"] > 3.5, "the link was down during a step"
    delayed = f" (delayed by {delay_ms:g} ms)" if delay_ms else ""
    record(f"link away for 4 s{delayed}", f"ok; the longest step took {result.metrics['step.max_seconds']:.1f} s")
