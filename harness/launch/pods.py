"""Machines that somebody else has started, one process of ours on each: Kubernetes' pods, as Kubeflow's TrainJob makes
them. The first one runs the harness; the others call it, and start agents for it until it hangs up.

    pod 0   meshmark run ... --engine pods       pod 1, 2, ...   the same command: `serve`
            Pods.start(1, agent) ---- command, log ------------> runs it, and calls again
            RemoteAgent.poll()  <--- how it has ended ----------

Pods see the results directory under the same path. What one pod may have another do is everything: they hold a key.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path

from harness.launch.calls import Calls
from harness.launch.failure import LaunchFailed
from harness.launch.torchrun import Agent, start_here

KEY_VARIABLE = "MESHMARK_PODS_KEY"
PORT = 29531  # beside torchrun's own default
CALL_SECONDS = 600.0  # until all pods are there: images are pulled first
_AGAIN_SECONDS = 0.5


class RemoteAgent:
    """An agent in another pod, and the line to it, which is its alone."""

    def __init__(self, line: Connection) -> None:
        self.returncode: int | None = None
        self._line = line

    def poll(self) -> int | None:
        """How it ended, negative for a signal; None while it runs. A pod that is gone has killed it."""
        try:
            while self.returncode is None and self._line.poll():
                self.returncode = self._line.recv()
        except (EOFError, OSError):
            self.returncode = -signal.SIGKILL
        return self.returncode

    def send_signal_to_all(self, number: int) -> None:
        """To the agent and whatever it has started in its own session."""
        with contextlib.suppress(OSError):
            self._line.send(number)


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among the pods. `host` is the first pod's name for the others."""

    node: int
    num_nodes: int
    host: str
    key: str
    port: int = PORT

    @classmethod
    def here(cls) -> Place:
        """From what Trainer tells a pod of its torch runtime. ValueError anywhere else."""
        names = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", KEY_VARIABLE)
        if absent := [name for name in names if not os.environ.get(name)]:
            raise ValueError(
                f"--engine pods: expected to run in the pods of a TrainJob, found no {', '.join(absent)}; see "
                "`meshmark submit --engine kubernetes`"
            )
        node, num_nodes, host, key = (os.environ[name] for name in names)
        return cls(node=int(node), num_nodes=int(num_nodes), host=host, key=key)


class Pods:
    """All pods, seen from the first, which listens for the others."""

    def __init__(self, place: Place, *, call_seconds: float = CALL_SECONDS) -> None:
        self.num_nodes, self.host = place.num_nodes, place.host
        self._call_seconds = call_seconds
        self._lines: dict[int, Connection] = {}
        self._called = threading.Condition()
        # On all of its addresses: to itself its name may mean 127.0.1.1.
        self._calls = Calls(("", place.port), place.key, self._take_call, backlog=place.num_nodes)

    def start(self, node: int, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Agent:
        """Runs `command` in the pod of `node`, with these variables beside its own. LaunchFailed where that one does
        not call."""
        if node == 0:
            return start_here(node, command, log, environment)
        with self._called:
            if not self._called.wait_for(lambda: node in self._lines, self._call_seconds):
                reason = f"pod {node} of {self.num_nodes} did not call in {self._call_seconds:g} s"
                raise LaunchFailed("timed out", reason)
            line = self._lines.pop(node)
        line.send((list(command), str(log), dict(environment)))
        return RemoteAgent(line)

    def close(self) -> None:
        """Lets the other pods go."""
        self._calls.close()
        with self._called:
            for line in self._lines.values():
                line.close()

    def _take_call(self, node: int, line: Connection) -> None:
        with self._called:
            self._lines[node] = line
            self._called.notify_all()


def serve(place: Place, *, call_seconds: float = CALL_SECONDS) -> None:
    """Starts agents for the first pod, as many at a time as it likes, until it hangs up. ConnectionError where it
    cannot be reached."""
    line = _call(place, call_seconds)
    agents: list[threading.Thread] = []
    with contextlib.suppress(EOFError, OSError):  # the first pod is done, or gone
        while True:
            line.send(place.node)
            agents.append(threading.Thread(target=_carry_out, args=(place, line, line.recv())))
            agents[-1].start()
            line = _call(place, 0.0)
    for agent in agents:
        agent.join()


def _carry_out(place: Place, line: Connection, request: tuple[Sequence[str], str, Mapping[str, str]]) -> None:
    """Runs one agent while the line that asked for it lasts."""
    command, log, environment = request
    agent = start_here(place.node, command, Path(log), environment)
    try:
        while agent.poll() is None:
            if line.poll(0.05):
                agent.send_signal_to_all(line.recv())
        line.send(agent.returncode)
    except (EOFError, OSError):
        pass  # the first pod is gone
    finally:
        agent.send_signal_to_all(signal.SIGKILL)
        agent.wait()
        line.close()


def _call(place: Place, call_seconds: float) -> Connection:
    until = time.monotonic() + call_seconds
    while True:
        try:
            return Client((place.host, place.port), authkey=place.key.encode())
        except OSError as error:
            if time.monotonic() > until:
                reason = f"the first pod cannot be reached at {place.host}:{place.port} in {call_seconds:g} s: {error}"
                raise ConnectionError(reason) from error
            time.sleep(_AGAIN_SECONDS)
