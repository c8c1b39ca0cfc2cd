"""Engines: what starts the ranks of a case. `local` forks them on this machine, in emulated nodes where a case has
several; `torchrun`, `srun` and `pods` have torchrun's agents start them, here, on the nodes of a Slurm allocation, or
in the pods of a TrainJob."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from harness.case import Case, Suite
from harness.launch import emulated, pods
from harness.launch.emulated import EmulatedNodes
from harness.launch.local import LocalLaunch
from harness.launch.pods import Pods
from harness.launch.torchrun import (
    AgentCommands,
    StartAgent,
    TorchrunLaunch,
    agent_command,
    free_port,
    is_host,
    local_agents,
    start_here,
)
from harness.launch.watched import Launch
from harness.topology import Topology

Name = Literal["local", "torchrun", "srun", "pods"]
NAMES: tuple[Name, ...] = ("local", "torchrun", "srun", "pods")


@dataclass(frozen=True, kw_only=True)
class Start:
    """How the ranks of one launch are to start."""

    case: Case
    directory: Path
    weights: Path | None
    device: str
    instrumented: bool
    nodes: EmulatedNodes | None = None


class Engine(Protocol):
    """What starts ranks. `emulates` nodes where a case has several; `shares_files` through a directory of the results
    where ranks do not see this machine's own."""

    emulates: bool
    shares_files: bool

    def fewest_nodes(self, world_size: int) -> int:
        """Nodes that so many ranks take at least."""
        ...

    def placed(self, case: Case) -> Case:
        """The case on the machines that this engine would give it."""
        ...

    def unavailable(self, case: Case) -> str | None:
        """Why it cannot start the ranks of such a case, or None."""
        ...

    def launch(self, start: Start) -> Launch: ...


class Local:
    """Processes of this machine."""

    emulates = True
    shares_files = False

    def fewest_nodes(self, world_size: int) -> int:
        return 1

    def placed(self, case: Case) -> Case:
        return case

    def unavailable(self, case: Case) -> str | None:
        return emulated.unavailable(case.placed) if case.placed.num_nodes > 1 else None

    def launch(self, start: Start) -> Launch:
        case = start.case
        return LocalLaunch(
            case.to_json(),
            case.world_size,
            start.directory,
            weights=start.weights,
            device=start.device,
            instrumented=start.instrumented,
            deadline_seconds=case.deadline_seconds,
            nodes=start.nodes,
        )


class Torchrun:
    """torchrun's agents, at most `ranks_per_node` ranks each; as many nodes as a case fills."""

    emulates = False

    def __init__(self, ranks_per_node: int, *, within_slurm: bool = False, pods: Pods | None = None) -> None:
        self.shares_files = within_slurm or pods is not None
        self._ranks_per_node = ranks_per_node
        self._within_slurm = within_slurm
        self._pods = pods

    def fewest_nodes(self, world_size: int) -> int:
        """That share the ranks evenly."""
        fewest = -(-world_size // self._ranks_per_node)
        return next(number for number in range(fewest, world_size + 1) if world_size % number == 0)

    def placed(self, case: Case) -> Case:
        """A case that names its own topology keeps it."""
        if case.topology is not None:
            return case
        return replace(case, topology=Topology.of(case.world_size, self.fewest_nodes(case.world_size)))

    def unavailable(self, case: Case) -> str | None:
        topology = case.placed
        if topology.link_mbits is not None or topology.delay_ms:
            return f"links are shaped on emulated nodes only, and the case asks for {topology}"
        if topology.ranks_per_node > self._ranks_per_node:
            return f"a node takes {self._ranks_per_node} ranks, and the case asks for {topology.ranks_per_node} on each"
        if self._within_slurm and topology.num_nodes > (nodes := int(os.environ["SLURM_JOB_NUM_NODES"])):
            return f"the allocation has {nodes} nodes, and the case asks for {topology.num_nodes}"
        if self._pods is not None and topology.num_nodes > self._pods.num_nodes:
            return f"the job has {self._pods.num_nodes} pods, and the case asks for {topology.num_nodes} nodes"
        return None

    def launch(self, start: Start) -> Launch:
        case, topology = start.case, start.case.placed
        agents = local_agents(topology, sys.executable)
        start_agent: StartAgent = start_here
        host: str | None = None
        if self._within_slurm:
            agents, host = _slurm_agents(topology), socket.gethostname()
        elif self._pods is not None:
            host = self._pods.host
            agents, start_agent = local_agents(topology, sys.executable, host), self._pods.start
        return TorchrunLaunch(
            case.to_json(),
            topology,
            start.directory,
            agents=agents,
            start=start_agent,
            host=host,
            weights=start.weights,
            device=start.device,
            instrumented=start.instrumented,
            deadline_seconds=case.deadline_seconds,
        )


def load(name: Name, ranks_per_node: int | None) -> Engine:
    """ValueError where an engine lacks what it needs."""
    if name == "local":
        if ranks_per_node is not None:
            raise ValueError("--ranks-per-node: expected with an engine other than local only, got --engine local")
        return Local()
    if ranks_per_node is None or ranks_per_node < 1:
        raise ValueError(f"--engine {name}: expected --ranks-per-node of at least 1, got {ranks_per_node}")
    if name == "pods":
        where = pods.Place.here()
        return Torchrun(ranks_per_node, pods=Pods(where))
    if name == "srun" and "SLURM_JOB_NUM_NODES" not in os.environ:
        raise ValueError("--engine srun: expected to run within a Slurm allocation, found none; see `meshmark submit`")
    if name == "srun" and "SLURMD_NODENAME" not in os.environ:  # as salloc leaves it: agents would not find each other
        raise ValueError("--engine srun: expected to run on the allocation's first node, found it outside; try sbatch")
    return Torchrun(ranks_per_node, within_slurm=name == "srun")


def place(suite: Suite, engine: Engine) -> Suite:
    """The suite on the machines of the engine."""
    return replace(suite, cases=tuple(engine.placed(case) for case in suite.cases))


def _slurm_agents(topology: Topology) -> AgentCommands:
    """One srun with one agent a node; the first keeps the store. The allocation's first node is where this runs."""

    def commands(module: Sequence[str]) -> list[list[str]]:
        endpoint = f"{socket.gethostname()}:{free_port()}"
        agent = shlex.join(agent_command(topology, sys.executable, endpoint))
        hosts = f"if [ $SLURM_PROCID = 0 ]; then host=1; else host=0; fi; exec {agent}"
        script = f"{hosts} {' '.join(is_host('$host'))} -m {shlex.join(module)}"
        nodes = ("--nodes", str(topology.num_nodes), "--ntasks", str(topology.num_nodes), "--ntasks-per-node", "1")
        # Some sites have jobs take no environment along, and agents need ours.
        always = ("--export=ALL", "--kill-on-bad-exit=1")
        return [["srun", *nodes, "--overlap", "--cpu-bind=none", *always, "sh", "-c", script]]

    return commands
