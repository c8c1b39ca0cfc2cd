"""Ports for servers that bind them some seconds later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has, below those that the system gives to whoever connects somewhere: one of
    these may be gone again when the server binds it."""
    first_given = int(_RANGE.read_text().split()[0]) if _RANGE.is_file() else 32768
    for port in random.sample(range(first_given - 12_000, first_given), 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
