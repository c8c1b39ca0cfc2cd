"""The torchrun launcher: agents, one a node, start the ranks; each rank calls back and takes commands as a local one
does.

    harness ------ commands, answers ------ rank 0, rank 1, ...
       |                                         |
       +-- srun, or one process a node -- torchrun's agents

A rank has two lines to the harness: one for commands, and one that a thread of its own listens on, which tells a living
rank from a stopped one, asks where it is, and ends it when the harness hangs up.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Protocol

from harness import scratch
from harness.case import Case
from harness.launch.calls import Calls
from harness.launch.failure import Ending, LaunchFailed, first_failure, signal_name
from harness.launch.fork_server import RANK_ENVIRONMENT
from harness.launch.timeouts import (
    COLLECTIVE_MARGIN_SECONDS,
    JOIN_SECONDS,
    ON_A_CLUSTER,
    ON_ONE_MACHINE,
    READ_SECONDS,
)
from harness.launch.watched import Job, Launch, Rank
from harness.placement import seats
from harness.topology import Topology

KEY_VARIABLE = "MESHMARK_KEY"
RANK_MODULE = "harness.launch.torchrun_rank"
_PONG_SECONDS = 1.0
_AGENT_SECONDS = 5.0  # for the agents' own accounts of how their workers ended, and for their ends
_LEAVING_SECONDS = 2.0  # for agents to end by themselves, once their workers have
_EXIT_CODES = re.compile(r"rank +: (?P<rank>\d+) .*?\n +exitcode +: (?P<code>-?\d+) ")
_FIRST_TASK = re.compile(r"^srun: error: (?P<node>\S+): tasks? [\d,-]+: (?P<how>.*)$", re.MULTILINE)
_TAIL_LINES = 12

AgentCommands = Callable[[Sequence[str]], Sequence[Sequence[str]]]
"""From what an agent shall run (a module and its arguments) to the commands that start all agents."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """How a rank introduces itself on each of its lines. `worker` is its rank in torchrun's own count."""

    line: str  # "commands" or "control"
    node: int
    local_rank: int
    worker: int
    pid: int
    host: str


class Agent(Protocol):
    """A command that starts agents, or one agent, wherever it runs."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        ...

    def send_signal_to_all(self, number: int) -> None:
        """To it, and whatever it has started in its own session."""
        ...


class LocalAgent(subprocess.Popen[bytes]):
    """On this machine."""

    def send_signal_to_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


StartAgent = Callable[[int, Sequence[str], Path, Mapping[str, str]], Agent]
"""From a node's number, a command, the file for its output and variables beside this process' own."""


def start_here(_number: int, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> LocalAgent:
    """On this machine, whatever the number."""
    with log.open("wb") as file:
        return LocalAgent(
            command,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )


class RemoteRank:
    """A rank that was started by somebody else, as far as its two lines tell."""

    def __init__(self, hello: Hello, channel: Connection, control: Connection) -> None:
        self.hello = hello
        self.channel = channel
        self.exit_code: int | None = None
        self._control = control

    @property
    def is_here(self) -> bool:
        return self.hello.host == socket.gethostname()

    @property
    def pid(self) -> int:
        return self.hello.pid

    @property
    def ends(self) -> Connection:
        return self._control

    def is_alive(self) -> bool:
        return not (_has_hung_up(self.channel) or _has_hung_up(self._control))

    def is_stopped(self) -> bool:
        with contextlib.suppress(OSError, EOFError):
            self._control.send("ping")
            if not self._control.poll(_PONG_SECONDS):
                return True
            self._control.recv()
        return False

    def ask_for_stack(self) -> None:
        self._control.send("stack")

    def join(self, timeout_seconds: float) -> None:
        until = time.monotonic() + timeout_seconds
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.01)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._control.close()


class TorchrunLaunch(Launch):
    """The ranks of one case, started by torchrun's agents on the nodes of `topology`; see LocalLaunch. LaunchFailed
    where they do not all come."""

    def __init__(
        self,
        case: dict[str, Any],
        topology: Topology,
        directory: Path,
        *,
        agents: AgentCommands,
        start: StartAgent = start_here,
        host: str | None = None,
        weights: Path | None = None,
        device: str = "cpu",
        threads: int = 1,
        instrumented: bool = False,
        deadline_seconds: float = 300.0,
        join_seconds: float = JOIN_SECONDS,
    ) -> None:
        super().__init__(deadline_seconds)
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._topology = topology
        self._agents: list[Agent] = []
        key = secrets.token_hex(16)
        self._called: Queue[tuple[Hello, Connection]] = Queue()
        self._calls = _calls(host, key, lambda *call: self._called.put(call), backlog=2 * topology.world_size)
        try:
            # Without a place for its logs torchrun leaves an empty directory among the temporary ones.
            places = {"PET_LOG_DIR": str(directory / "torchrun"), KEY_VARIABLE: key}
            environment = {**RANK_ENVIRONMENT, **places}
            for number, command in enumerate(agents([RANK_MODULE, _written(self._calls.address, host)])):
                self._agents.append(start(number, command, self._agent_log(number), environment))
            lines = self._wait_for_ranks(join_seconds)
            placed = seats(Case.from_json(case).layout, topology)
            for rank, node in enumerate(placed.node_of_rank):
                local_rank = placed.local_rank(rank)
                hello, commands = lines["commands", node, local_rank]
                job = Job(
                    case=case,
                    rank=rank,
                    directory=directory,
                    rendezvous=None,
                    weights=weights,
                    device=device,
                    local_rank=local_rank,
                    threads=threads,
                    instrumented=instrumented,
                    timeout_seconds=deadline_seconds + COLLECTIVE_MARGIN_SECONDS,
                    timeouts=ON_ONE_MACHINE if host is None else ON_A_CLUSTER,
                )
                process = RemoteRank(hello, commands, lines["control", node, local_rank][1])
                self._ranks.append(Rank(process=process, job=job))
                commands.send(job)
        except BaseException:
            self.kill()
            raise

    def _wait_for_ranks(self, join_seconds: float) -> dict[tuple[str, int, int], tuple[Hello, Connection]]:
        lines: dict[tuple[str, int, int], tuple[Hello, Connection]] = {}
        until = time.monotonic() + join_seconds
        wanted = 2 * self._topology.world_size
        while len(lines) < wanted:
            try:
                hello, line = self._called.get(timeout=0.1)
                lines[hello.line, hello.node, hello.local_rank] = (hello, line)
            except Empty:
                gone = [agent.returncode for agent in self._agents if agent.poll()]
                if gone or time.monotonic() > until:
                    came = len({(node, local) for _, node, local in lines})
                    why = (
                        f"an agent left with exit code {gone[0]}"
                        if gone
                        else f"not all ranks joined in {join_seconds:g} s"
                    )
                    raise LaunchFailed(
                        "failed" if gone else "timed out",
                        f"{why}: {came} of {wanted // 2} ranks on {self._topology.num_nodes} nodes came",
                        traceback=self._agent_tails(),
                    ) from None
        return lines

    def _before_blaming(self) -> None:
        """Waits for the agents' accounts of how their workers have ended."""
        until = time.monotonic() + _AGENT_SECONDS
        while time.monotonic() < until:
            codes = self._exit_codes()
            for rank in self._ranks:
                process = rank.process
                assert isinstance(process, RemoteRank)
                process.exit_code = codes.get(process.hello.worker, process.exit_code)
            if codes or all(agent.poll() is not None for agent in self._agents) or not self._someone_died():
                return
            time.sleep(0.1)

    def _someone_died(self) -> bool:
        return any(rank.died_at is not None and rank.report is None for rank in self._ranks)

    def _exit_codes(self) -> dict[int, int]:
        """Of torchrun's workers, from the tables that its agents print when one fails."""
        found: dict[int, int] = {}
        for number in range(len(self._agents)):
            for match in _EXIT_CODES.finditer(_read(self._agent_log(number))):
                found.setdefault(int(match["rank"]), int(match["code"]))
        return found

    def _blame(self, endings: Sequence[Ending], name: str) -> LaunchFailed:
        """An agent that was killed takes its ranks along, and none of them is the culprit."""
        for number, agent in enumerate(self._agents):
            if (code := agent.poll() or 0) < 0:
                who, how = f"of node {number}", f" by {signal_name(-code)}"
            elif node := _killed_under_srun(_read(self._agent_log(number))):
                who, how = f"on {node}", ""
            else:
                continue
            why = f"the agent {who} was killed{how} during {name}"
            return LaunchFailed("failed", why, traceback=self._agent_tails())
        return first_failure(endings, name, signals_first=True)

    def _clean_up(self) -> None:
        self._calls.close()
        for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
            for agent in self._agents:
                if signal_number is not None and agent.poll() is None:
                    agent.send_signal_to_all(signal_number)
            until = time.monotonic() + (_LEAVING_SECONDS if signal_number is None else _AGENT_SECONDS)
            while any(agent.poll() is None for agent in self._agents) and time.monotonic() < until:
                time.sleep(0.02)
        while not self._called.empty():
            self._called.get()[1].close()

    def _agent_log(self, number: int) -> Path:
        return self._directory / f"agent-{number}.log"

    def _agent_tails(self) -> str:
        """The last lines of what the agents have said."""
        said = []
        for number in range(len(self._agents)):
            if lines := _read(self._agent_log(number)).splitlines():
                said += [f"agent {number}:", *lines[-_TAIL_LINES:]]
        return "\n".join(said)


def local_agents(topology: Topology, python: str, host: str = "127.0.0.1") -> AgentCommands:
    """One agent a node; the first is on this machine, which the others know as `host`."""

    def commands(module: Sequence[str]) -> list[list[str]]:
        agent = agent_command(topology, python, f"{host}:{free_port()}")
        return [[*agent, *is_host(str(int(node == 0))), "-m", *module] for node in range(topology.num_nodes)]

    return commands


def is_host(value: str) -> list[str]:
    """Says which agent keeps the store (`1`), instead of leaving it to a comparison of host names."""
    return ["--rdzv-conf", f"is_host={value},join_timeout={JOIN_SECONDS:g},read_timeout={READ_SECONDS:g}"]


def agent_command(topology: Topology, python: str, endpoint: str) -> list[str]:
    """torchrun for one node of `topology`, as far as all nodes' are alike. A failed worker is not started again: the
    harness begins anew."""
    return [
        *(python, "-m", "torch.distributed.run"),
        *("--nnodes", str(topology.num_nodes), "--nproc-per-node", str(topology.ranks_per_node)),
        *("--max-restarts", "0", "--monitor-interval", "0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", secrets.token_hex(4)),
    ]


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _calls(host: str | None, key: str, take: Callable[[Any, Connection], None], *, backlog: int) -> Calls:
    """On a socket of this machine, or, where ranks call from other nodes, on all of its addresses: to itself its name
    may well mean 127.0.1.1."""
    scratch.place_sockets()
    return Calls(None if host is None else ("", 0), key, take, backlog=backlog)


def _written(address: Any, host: str | None) -> str:
    """For the ranks, to whom `host` means what it does to them."""
    return str(address) if host is None else f"{host}:{address[1]}"


def _killed_under_srun(said: str) -> str | None:
    """The node whose task was the first to end, if somebody killed it; srun kills the others after it."""
    first = _FIRST_TASK.search(said)
    return first["node"] if first and first["how"].startswith("Killed") else None


def _read(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""


def _has_hung_up(line: Connection) -> bool:
    """Whether its other end is gone and nothing is left to read."""
    try:
        with socket.socket(fileno=os.dup(line.fileno())) as peeked:
            return peeked.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
