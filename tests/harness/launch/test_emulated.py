"""Emulated nodes, with real namespaces, links and ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import runner
from harness.case import Case, Measurement, Suite
from harness.launch import emulated
from harness.launch.emulated import EmulatedNodes
from harness.layout import Layout
from harness.progress import SilentProgress
from harness.result import Result
from harness.topology import Placement, Topology

TWO_BY_TWO = Topology(num_nodes=2, ranks_per_node=2, link_mbits=200.0)
SENT, FORESEEN = "node_wire_bytes_per_step", "predicted_node_wire_bytes_per_step"
DELAYED = Topology(num_nodes=2, ranks_per_node=1, link_mbits=200.0, delay_ms=5.0)


@pytest.fixture(autouse=True)
def _where_nodes_can_be_emulated() -> None:
    if reason := emulated.unavailable(TWO_BY_TWO):
        pytest.skip(reason)


def holders_of(pid: int) -> set[int]:
    """The processes that hold namespaces for the process `pid`: its children, and theirs."""
    found, open_ends = set(), [pid]
    while open_ends:
        listed = Path(f"/proc/{open_ends.pop()}/task").glob("*/children")
        children = [int(word) for each in listed for word in each.read_text().split()]
        open_ends += children
        found |= {child for child in children if Path(f"/proc/{child}/comm").read_text().strip() == "cat"}
    return found


def run(case: Case, directory: Path) -> Result:
    (result,) = runner.run(Suite(name="s", cases=(case,)), directory, progress=SilentProgress())
    return result


def case(topology: Topology, **options: int) -> Case:
    steps = {"parity_steps": 3, "timed_steps": 2, "communication_steps": 0, "memory_steps": 0} | options
    return Case(
        workload="gpt:size=tiny",
        implementation="native.ddp",
        layout=Layout(data=topology.world_size),
        topology=topology,
        measurement=Measurement(warm_up_steps=1, **steps),
    )


def test_a_node_has_its_own_network_and_what_it_sends_is_counted() -> None:
    with EmulatedNodes(TWO_BY_TWO) as nodes:
        networks = [nodes.network_of(node) for node in range(2)]
        namespaces = {Path(f"/proc/{network.holder}/ns/net").readlink() for network in networks}
        assert len(namespaces) == 2
        assert Path("/proc/self/ns/net").readlink() not in namespaces
        before = nodes.sent_bytes()
        speak = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(bytes(%d), (%r, 9))"
        nodes._run(nodes._nodes[0], [sys.executable, "-c", speak % (1000, emulated.address(1))])
        sent = [after - start for start, after in zip(before, nodes.sent_bytes(), strict=True)]
        assert 1028 <= sent[0] <= 3000  # 1000 bytes, UDP and IP headers, and the neighbours' first questions
        assert sent[1] < 1000


def test_nothing_is_left_when_the_harness_is_killed(tmp_path: Path) -> None:
    source = (
        "import time\nfrom harness.launch.emulated import EmulatedNodes\nfrom harness.topology import Topology\n"
        "nodes = EmulatedNodes(Topology(num_nodes=3, ranks_per_node=1, link_mbits=100.0))\n"
        "print('up', flush=True)\ntime.sleep(60)\n"
    )
    harness = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert harness.stdout is not None
    assert harness.stdout.readline() == "up\n"
    holders = holders_of(harness.pid)
    assert len(holders) == 4  # a switch and three nodes
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    harness.stdout.close()
    until = time.monotonic() + 10
    while any(map(_is_running, holders)):
        assert time.monotonic() < until, "a namespace outlives the harness"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def over_a_slow_link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    yield run(case(TWO_BY_TWO), tmp_path_factory.mktemp("slow"))


def test_a_case_runs_over_links_as_declared(over_a_slow_link: Result) -> None:
    assert (over_a_slow_link.status, over_a_slow_link.reason) == ("ok", None)
    assert over_a_slow_link.environment["emulated"] is True
    metrics = over_a_slow_link.metrics
    assert metrics["topology.measured_link_mbits"] == pytest.approx(200.0, rel=0.15)
    # A ring over two nodes of two ranks: 2 (n - 1) / n of the payload leaves each node.
    assert metrics["topology.wire_bytes_per_payload"] == pytest.approx(1.5, rel=0.03)


def test_what_a_step_puts_on_the_link_is_the_closed_form(over_a_slow_link: Result) -> None:
    """Two levels by themselves, where two nodes have two ranks each: 2 (N - 1) / N of the gradients."""
    gradients = 4 * 42368  # parameters of the tiny GPT, fp32
    assert over_a_slow_link.environment["facts"]["levels"] == "2 nodes of 2 ranks"
    sent, foreseen = (over_a_slow_link.metrics[f"communication.{name}"] for name in (SENT, FORESEEN))
    assert foreseen == gradients
    assert sent == pytest.approx(foreseen, rel=0.05)


@pytest.mark.parametrize(
    ("implementation", "layout", "placement", "options"),
    [
        ("native.ddp", Layout(data=4), "scattered", {"hierarchical": "off"}),
        ("native.zero", Layout(data=4), "contiguous", {"stage": 3}),
        ("native.hybrid", Layout(data=2, tensor=2), "scattered", {}),
    ],
)
def test_other_placements_and_strategies_send_what_is_foreseen(
    implementation: str, layout: Layout, placement: Placement, options: dict[str, Any], tmp_path: Path
) -> None:
    placed = replace(TWO_BY_TWO, link_mbits=None, placement=placement)
    changes: dict[str, Any] = {"implementation": implementation, "layout": layout, "options": options}
    plain = case(placed, parity_steps=0)
    result = run(replace(plain, workload="gpt:size=0.9m,global_batch_size=4", **changes), tmp_path)
    assert result.status == "ok", result.reason
    sent, foreseen = (result.metrics[f"communication.{name}"] for name in (SENT, FORESEEN))
    assert sent == pytest.approx(foreseen, rel=0.03)


def test_one_node_that_a_case_names_is_emulated_too(tmp_path: Path) -> None:
    """It differs from those with several by the links alone: not by this machine's congestion control, say."""
    named = case(Topology(ranks_per_node=2), parity_steps=0)
    on_its_own = replace(named, topology=None, workload="gpt:size=tiny,sequence_length=8")
    suite = Suite(name="s", cases=(named, on_its_own))
    found = runner.run(suite, tmp_path, progress=SilentProgress())
    assert [(result.status, result.environment["emulated"]) for result in found] == [("ok", True), ("ok", False)]
    assert not any(name.startswith("topology.") or SENT in name for name in found[0].metrics)


def test_a_delay_is_a_delay(tmp_path: Path) -> None:
    if reason := emulated.unavailable(DELAYED):
        pytest.skip(reason)
    result = run(case(DELAYED, timed_steps=0), tmp_path)
    assert result.status == "ok", result.reason
    assert 5.0 <= result.metrics["topology.measured_delay_ms"] <= 6.25


def test_a_delayed_link_that_is_down_for_a_moment_loses_packets_and_comes_back() -> None:
    if reason := emulated.unavailable(DELAYED):
        pytest.skip(reason)
    speak = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)\n"
        "if sys.argv[1] == 'hear': s.bind(('', 9)); print('here', flush=True); print(s.recv(99).decode())\n"
        "else: s.sendto(sys.argv[1].encode(), (sys.argv[2], 9))"
    )
    with EmulatedNodes(DELAYED) as nodes:
        first, second = nodes._nodes
        nodes._ip(second, [f"link set {emulated.INTERFACE} down"])
        nodes._run(first, [sys.executable, "-c", speak, "lost", emulated.address(1)])
        time.sleep(0.2)
        nodes._ip(second, [f"link set {emulated.INTERFACE} up"])
        hears = [
            *nodes._within_user(),
            "nsenter",
            "--net",
            "--target",
            str(second.pid),
            sys.executable,
            "-c",
            speak,
            "hear",
        ]
        with subprocess.Popen(hears, stdout=subprocess.PIPE, text=True) as hearer:
            assert hearer.stdout is not None
            assert hearer.stdout.readline() == "here\n"
            nodes._run(first, [sys.executable, "-c", speak, "carried", emulated.address(1)])
            assert hearer.stdout.readline() == "carried\n"


def test_links_that_are_not_as_declared_are_a_mismatch(tmp_path: Path) -> None:
    result = run(case(Topology(num_nodes=2, ranks_per_node=1, link_mbits=100_000.0)), tmp_path)
    assert result.status == "topology mismatch"
    assert (result.reason or "").startswith("the link is declared at 100000 Mbit/s and carries ")
    assert "step.median_seconds" not in result.metrics
