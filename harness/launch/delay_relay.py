"""A relay that carries packets between the TUN devices of emulated nodes, each a fixed time after it was sent.

`python -m harness.launch.delay_relay DELAY_MS INTERFACE HOLDER...`, with one holder process a node: makes a device of
that name in the network namespace of each, says `ready`, and ends with its input.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

from harness.launch.node_network import address, enter_namespace

_TUN = "/dev/net/tun"
_SET_INTERFACE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI
_MOST_BYTES = 2**16  # of a packet
_DESTINATION = slice(16, 20)  # of an IPv4 header


def main(arguments: Sequence[str]) -> None:
    """Relays until the input ends."""
    delay_seconds, interface, holders = float(arguments[0]) / 1000.0, arguments[1], arguments[2:]
    devices = [_open_device(interface, int(holder)) for holder in holders]
    print("ready", flush=True)
    _relay(devices, delay_seconds)


def _open_device(interface: str, holder: int) -> int:
    """A TUN device in the holder's namespace, where it stays whatever namespace this process enters next."""
    enter_namespace(holder, "net")
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH", interface.encode(), _TUN_WITHOUT_HEADER))
    return device


def _relay(devices: Sequence[int], delay_seconds: float) -> None:
    of_address = {bytes(map(int, address(node).split("."))): device for node, device in enumerate(devices)}
    waiting: deque[tuple[float, int, bytes]] = deque()  # the delay is one and the same: first come, first out
    sources = [sys.stdin.fileno(), *devices]
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select(sources, [], [], timeout)[0]
        if sys.stdin.fileno() in ready:
            return
        for device in ready:
            try:
                packet = os.read(device, _MOST_BYTES)
            except BlockingIOError:  # a device that is taken down forgets what it has announced
                continue
            target = of_address.get(packet[_DESTINATION])
            if target is not None:  # else the kernel's own multicasts, which nobody listens to
                waiting.append((time.monotonic() + delay_seconds, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # a link that is down loses what comes over it
                os.write(target, packet)


if __name__ == "__main__":
    main(sys.argv[1:])
