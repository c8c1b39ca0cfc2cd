"""Emulated nodes: network namespaces of this machine, one a node, joined by a bridge over links that the kernel shapes.

    node 0                 switch                 node 1
    eth0 [tbf] ======== [tbf] port0
                              bridge
                              port1 [tbf] ======== [tbf] eth0

A namespace here has no name and no file: it lasts while a process is in it. What holds it is a `cat` that ends when its
input does, and the other end of that is this process's: however the harness ends, its nodes and links are gone.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from harness.launch.node_network import NodeNetwork, address
from harness.topology import Topology

INTERFACE = "eth0"
# The burst has to hold what leaves at once (segmentation offload hands 64 KiB over): with smaller ones TCP retransmits,
# and the link carries less than its rate.
_SHAPER = ("burst", "256kb", "latency", "50ms")
_CONGESTION_CONTROL = "reno"
_RELAYED_UNIT = 65521  # few and large packets, for each costs the relay its time
_COMMAND_SECONDS = 20.0
_TUN = Path("/dev/net/tun")


class EmulatedNodes:
    """The nodes of `topology`, up and linked. Use as a context manager. OSError, with what failed, where they cannot be
    made; nothing is left of them then."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._owned = os.geteuid() != 0
        self._holders: list[subprocess.Popen[str]] = []
        self._relay: subprocess.Popen[str] | None = None
        try:
            self._switch = self._hold()
            self._nodes = [self._hold() for _ in range(topology.num_nodes)]
            self._link()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EmulatedNodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def network_of(self, node: int) -> NodeNetwork:
        """How a rank gets into the network of its node."""
        return NodeNetwork(holder=self._nodes[node].pid, interface=INTERFACE, owned=self._owned)

    def sent_bytes(self) -> list[int]:
        """What each node has put on its link so far, headers included."""
        return [self._counter(node) for node in self._nodes]

    def close(self) -> None:
        """Lets go of the namespaces; those that a rank is still in last until it ends."""
        processes = [*self._holders, *([self._relay] if self._relay else [])]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._holders.clear()
        self._relay = None

    def _hold(self) -> subprocess.Popen[str]:
        """A process in a network namespace of its own; all of them in one user namespace where this user needs one."""
        within: list[str] = []
        if self._owned and self._holders:
            within = ["nsenter", "--user", "--preserve-credentials", "--target", str(self._holders[0].pid)]
        kinds = ["--net"] if within or not self._owned else ["--user", "--map-root-user", "--net"]
        holder = subprocess.Popen(
            [*within, "unshare", *kinds, "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        with holder.stderr as errors:
            try:
                holder.stdin.write("ready\n")
                holder.stdin.flush()
                answer = holder.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if answer != "ready\n":
                raise OSError(f"cannot make a network namespace: {errors.read().strip()}")
        return holder

    def _link(self) -> None:
        """The bridge, a link to each node, its address, its rate."""
        lines = ["link set lo up"]
        if not self.topology.delay_ms:
            lines += ["link add switch type bridge", "link set switch up"]
            for number, node in enumerate(self._nodes):
                lines += [
                    f"link add port{number} type veth peer name {INTERFACE} netns {node.pid}",
                    f"link set port{number} master switch up",
                ]
        self._ip(self._switch, lines)
        if self.topology.delay_ms:
            self._start_relay()
        unit = f" mtu {_RELAYED_UNIT}" if self.topology.delay_ms else ""
        for number, node in enumerate(self._nodes):
            self._ip(
                node,
                [f"addr add {address(number)}/16 dev {INTERFACE}", f"link set {INTERFACE} up{unit}", "link set lo up"],
            )
            self._run(node, ["sh", "-c", f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"])
        if self.topology.link_mbits is not None:
            for number, node in enumerate(self._nodes):
                self._shape(node, INTERFACE)
                if not self.topology.delay_ms:
                    self._shape(self._switch, f"port{number}")

    def _start_relay(self) -> None:
        """The links of a delayed topology are TUN devices, between which a process of ours carries packets."""
        command = [sys.executable, "-m", "harness.launch.delay_relay", f"{self.topology.delay_ms:g}", INTERFACE]
        command += [str(node.pid) for node in self._nodes]
        relay = subprocess.Popen(
            [*self._within_user(), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parent.parent.parent,
        )
        self._relay = relay
        assert relay.stdout is not None
        assert relay.stderr is not None
        with relay.stderr as errors:
            if relay.stdout.readline() != "ready\n":
                raise OSError(f"cannot start the relay that delays packets: {errors.read().strip()}")

    def _shape(self, holder: subprocess.Popen[str], interface: str) -> None:
        rate = f"{round(1000 * float(self.topology.link_mbits or 0))}kbit"
        self._run(holder, ["tc", "qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, *_SHAPER])

    def _counter(self, holder: subprocess.Popen[str]) -> int:
        told = json.loads(self._run(holder, ["ip", "-json", "-statistics", "link", "show", "dev", INTERFACE]))
        return int(told[0]["stats64"]["tx"]["bytes"])

    def _ip(self, holder: subprocess.Popen[str], lines: list[str]) -> None:
        self._run(holder, ["ip", "-batch", "-"], "\n".join(lines) + "\n")

    def _run(self, holder: subprocess.Popen[str], command: list[str], text: str = "") -> str:
        """A command in the holder's namespaces; what it prints."""
        try:
            done = subprocess.run(
                [*self._within_user(), "nsenter", "--net", "--target", str(holder.pid), *command],
                input=text,
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            late = f"no answer within {_COMMAND_SECONDS:g} s"
            raise OSError(f"{' '.join(command[:2])} in an emulated node: {late}") from error
        if done.returncode:
            raise OSError(f"{' '.join(command[:2])} in an emulated node: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def _within_user(self) -> list[str]:
        if not self._owned:
            return []
        return ["nsenter", "--user", "--preserve-credentials", "--target", str(self._holders[0].pid)]


def unavailable(topology: Topology) -> str | None:
    """Why nodes such as these cannot be emulated here, or None."""
    if topology.delay_ms and not os.access(_TUN, os.R_OK | os.W_OK):
        return f"delay unavailable: {_TUN} cannot be opened"
    return _unavailable()


@functools.cache
def _unavailable() -> str | None:
    try:
        EmulatedNodes(Topology(num_nodes=2, ranks_per_node=1, link_mbits=1000.0)).close()
    except OSError as error:
        return f"nodes cannot be emulated here: {error}".splitlines()[0]
    return None
