"""Links: what a topology declares of its links beside what they carry, measured before a case by an all-reduce over all
ranks and by a round trip between two nodes."""

from __future__ import annotations

from collections.abc import Sequence

from harness.topology import Topology

TOLERANCE = 0.15
NUM_REPEATS = 5
NUM_ROUND_TRIPS = 20
_SECONDS = 0.2  # of an all-reduce at the declared rate
_UNSHAPED_BYTES = 2**24
_MOST_BYTES = 2**26
_FEWEST_BYTES = 2**20  # below, what a burst lets through at once would count
_SCHEDULING_MS = 0.5  # by which the shortest round trip on a machine of few processors may exceed its delays


def payload_bytes(topology: Topology) -> int:
    """Of an all-reduce that keeps the links busy for some tenths of a second; a node sends one to two times as much."""
    if topology.link_mbits is None:
        return _UNSHAPED_BYTES
    return min(_MOST_BYTES, max(_FEWEST_BYTES, round(topology.link_mbits * 1e6 / 8 * _SECONDS / 1.5)))


def carried_mbits(seconds: Sequence[float], sent_bytes: Sequence[int]) -> float:
    """Mbit/s on the busiest node's link: what it sent in all repeats (`sent_bytes`, by node), over the time they would
    all have taken at the fastest one's; a machine that is busy elsewhere slows some of them down, none up."""
    return max(sent_bytes) * 8 / (len(seconds) * min(seconds)) / 1e6


def one_way_ms(round_trip_seconds: Sequence[float]) -> float:
    """Half of the shortest round trip."""
    return min(round_trip_seconds) / 2 * 1e3


def mismatch(topology: Topology, measured_mbits: float, measured_delay_ms: float) -> str | None:
    """What is not as declared, or None. An unshaped link may carry whatever it does."""
    declared = topology.link_mbits
    if declared is not None and abs(measured_mbits / declared - 1) > TOLERANCE:
        return f"the link is declared at {declared:g} Mbit/s and carries {measured_mbits:.0f}"
    low = topology.delay_ms * (1 - TOLERANCE)
    high = topology.delay_ms * (1 + TOLERANCE) + _SCHEDULING_MS
    if topology.delay_ms and not low <= measured_delay_ms <= high:
        return f"the link is declared with a delay of {topology.delay_ms:g} ms and has {measured_delay_ms:.2f}"
    return None
