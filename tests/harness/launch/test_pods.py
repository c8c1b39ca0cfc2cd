"""Agents in other pods, which here are processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launch.failure import LaunchFailed
from harness.launch.pods import KEY_VARIABLE, PORT, Place, Pods, serve

ROOT = Path(__file__).resolve().parents[3]
SUITE = """
from harness.case import Case, Measurement, Suite
from harness.layout import Layout

QUICK = Measurement(parity_steps=3, warm_up_steps=1, timed_steps=2, communication_steps=1, memory_steps=0)
CASE = Case(workload="gpt:size=tiny", implementation="native.ddp", layout=Layout(data=2), measurement=QUICK)
suite = Suite(name="one", cases=(CASE,))
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def place(node: int, port: int, key: str = "k") -> Place:
    return Place(node=node, num_nodes=2, host="127.0.0.1", key=key, port=port)


@pytest.fixture
def pods() -> Iterator[Pods]:
    """Two, of which the second is a thread here."""
    port = free_port()
    first = Pods(place(0, port), call_seconds=20.0)
    second = threading.Thread(target=serve, args=(place(1, port),), kwargs={"call_seconds": 20.0})
    second.start()
    yield first
    first.close()
    second.join(20.0)
    assert not second.is_alive(), "it goes when the first hangs up"


def ended(agent: object, seconds: float = 10.0) -> int | None:
    until = time.monotonic() + seconds
    while (code := agent.poll()) is None and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(0.02)
    return code  # type: ignore[no-any-return]


def test_agents_run_side_by_side_and_tell_how_they_ended(pods: Pods, tmp_path: Path) -> None:
    hello = pods.start(1, ["sh", "-c", "echo $WHO is here; exit 3"], tmp_path / "hello.log", {"WHO": "agent"})
    sleeps = [pods.start(node, ["sleep", "60"], tmp_path / f"{node}.log", {}) for node in (0, 1)]
    assert ended(hello) == 3
    assert (tmp_path / "hello.log").read_text() == "agent is here\n"
    assert [agent.poll() for agent in sleeps] == [None, None]
    for agent in sleeps:
        agent.send_signal_to_all(signal.SIGTERM)
    assert [ended(agent) for agent in sleeps] == [-signal.SIGTERM] * 2


def test_what_runs_ends_with_the_first_pod(pods: Pods, tmp_path: Path) -> None:
    agent = pods.start(1, ["sh", "-c", "echo $$; exec sleep 60"], tmp_path / "log", {})
    until = time.monotonic() + 10.0
    while not (written := (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
        assert time.monotonic() < until
        time.sleep(0.02)
    agent._line.close()  # type: ignore[attr-defined]  as its process' end does
    while Path(f"/proc/{int(written)}").exists():
        assert time.monotonic() < until, "the agent is still there"
        time.sleep(0.02)


def test_a_pod_that_does_not_call_is_named() -> None:
    first = Pods(place(0, port := free_port()), call_seconds=0.5)
    stranger = threading.Thread(target=_refused, args=(place(1, port, key="another"),))
    stranger.start()
    with pytest.raises(LaunchFailed, match=r"^pod 1 of 2 did not call in 0\.5 s$"):
        first.start(1, ["true"], Path("/dev/null"), {})
    stranger.join(10.0)
    assert not stranger.is_alive()
    first.close()


def _refused(where: Place) -> None:
    with pytest.raises(Exception, match="digest"):
        serve(where, call_seconds=0.5)


def test_nobody_to_call_is_told() -> None:
    with pytest.raises(ConnectionError, match=r"the first pod cannot be reached at 127\.0\.0\.1:\d+ in 0 s"):
        serve(place(1, free_port()), call_seconds=0.0)


def test_outside_a_job_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    for name in ("PET_NODE_RANK", "PET_MASTER_ADDR", KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=f"found no PET_NODE_RANK, PET_MASTER_ADDR, {KEY_VARIABLE}; see"):
        Place.here()


@pytest.mark.cluster
def test_a_suite_runs_in_two_pods(tmp_path: Path) -> None:
    """The command of the manifest, once in each pod."""
    with socket.socket() as taken:
        if taken.connect_ex(("127.0.0.1", PORT)) == 0:
            pytest.skip(f"port {PORT} is taken here")
    (tmp_path / "one.py").write_text(SUITE)
    arguments = ["run", "one.py", "--engine", "pods", "--ranks-per-node", "1", "--results", "r", "--no-upload"]
    trainer = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", KEY_VARIABLE: "k", "PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "harness", *arguments],
            cwd=tmp_path, env={**os.environ, **trainer, "PET_NODE_RANK": str(node)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in (1, 0)
    ]  # fmt: skip
    told = [pod.communicate(timeout=280)[0] for pod in both]
    assert [pod.returncode for pod in both] == [0, 0], told
    (line,) = (json.loads(line) for line in (tmp_path / "r" / "results.jsonl").read_text().splitlines())
    assert (line["status"], line["parity"]["ok"], line["case"]["topology"]["num_nodes"]) == ("ok", True, 2)
    assert line["metrics"]["communication.bytes_per_step"] > 0, "the instrumented ranks came from both pods, too"
