"""The bytes that a node puts on its link in a step, by the kernel's counters, beside the closed form."""

from __future__ import annotations

from collections.abc import Mapping

SENT = "communication.node_wire_bytes_per_step"
FORESEEN = "communication.predicted_node_wire_bytes_per_step"
TOLERANCE = 0.03
FEWEST_BYTES = 2**18  # below, headers of small messages, acknowledgements and the ranks' meetings are a part of note


def apart(metrics: Mapping[str, float]) -> float | None:
    """By how much the bytes sent differ from those foreseen, as a part of these; None where either is not known."""
    sent, foreseen = metrics.get(SENT), metrics.get(FORESEEN)
    return None if sent is None or not foreseen else abs(sent / foreseen - 1)


def mismatch(metrics: Mapping[str, float]) -> str | None:
    """What is more than `TOLERANCE` apart, or None; of fewer than `FEWEST_BYTES` nothing is said."""
    difference = apart(metrics)
    if difference is None or difference <= TOLERANCE or metrics[FORESEEN] < FEWEST_BYTES:
        return None
    return (
        f"a node sends {metrics[SENT]:,.0f} bytes in a step, where {metrics[FORESEEN]:,.0f} are foreseen: "
        f"{difference:.1%} apart, expected at most {TOLERANCE:.0%}"
    )
