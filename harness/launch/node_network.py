"""The network of emulated nodes: addresses, and a process' way into a namespace."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Literal

_KINDS = {"user": 0x10000000, "net": 0x40000000}  # CLONE_NEWUSER, CLONE_NEWNET
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class NodeNetwork:
    """`holder` is a process in the node's network namespace, which `interface` links with the other nodes; `owned`
    where the namespace belongs to a user namespace, which has to be entered first."""

    holder: int
    interface: str
    owned: bool

    def enter(self) -> None:
        """Moves this process, which must have one thread, into the namespace, and has libraries listen on its link.
        OSError where the system does not allow it."""
        if self.owned:
            enter_namespace(self.holder, "user")
        enter_namespace(self.holder, "net")
        os.environ.update(dict.fromkeys(_INTERFACE_VARIABLES, self.interface))


def address(node: int) -> str:
    """The address of a node on the emulated network."""
    return f"10.77.{node // 250}.{node % 250 + 1}"


def enter_namespace(holder: int, kind: Literal["user", "net"]) -> None:
    """Moves this thread into the namespace of the process `holder`. OSError where the system does not allow it."""
    path = f"/proc/{holder}/ns/{kind}"
    file = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file, _KINDS[kind]):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network of a node: {os.strerror(number)}", path)
    finally:
        os.close(file)
