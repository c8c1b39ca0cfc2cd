"""Topology: the machines a case runs on: nodes, ranks per node, the link between nodes, and what is placed together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Placement = Literal["contiguous", "scattered", "tensor_inside_node", "shard_group_inside_node"]
_LEAST_MBITS, _MOST_MBITS = 1.0, 1e7  # on a slower one a calibration takes minutes; no machine's is faster
_MOST_DELAY_MS = 10_000.0  # ranks would not have joined by then, see harness/launch/timeouts.py


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`link_mbits` None means that the link is not shaped. Placement `contiguous` fills a node before the next one;
    `scattered` deals ranks out to the nodes in turn; the others fill nodes with whole groups of an axis, see
    harness/placement.py."""

    num_nodes: int = 1
    ranks_per_node: int
    link_mbits: float | None = None
    delay_ms: float = 0.0
    placement: Placement = "contiguous"

    @classmethod
    def of(cls, world_size: int, num_nodes: int, **links: Any) -> Topology:
        """`world_size` ranks spread evenly over the nodes. ValueError where that cannot be."""
        if num_nodes < 1 or world_size % num_nodes:
            raise ValueError(f"topology: {world_size} ranks cannot be spread evenly over {num_nodes} nodes")
        return cls(num_nodes=num_nodes, ranks_per_node=world_size // num_nodes, **links)

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"topology: {name} must be a positive integer, got {value!r}")
        if self.link_mbits is not None and not _is_within(self.link_mbits, _LEAST_MBITS, _MOST_MBITS):
            raise ValueError(
                f"topology: link_mbits must be from {_LEAST_MBITS:g} to {_MOST_MBITS:g}, got {self.link_mbits!r}"
            )
        if not _is_within(self.delay_ms, 0.0, _MOST_DELAY_MS):
            raise ValueError(f"topology: delay_ms must be from 0 to {_MOST_DELAY_MS:g}, got {self.delay_ms!r}")
        if self.num_nodes == 1 and (self.link_mbits is not None or self.delay_ms):
            raise ValueError(
                f"topology: one node has no link to another, got link_mbits {self.link_mbits}, delay_ms {self.delay_ms}"
            )
        if self.placement not in get_args(Placement):
            raise ValueError(
                f"topology: placement must be one of {', '.join(get_args(Placement))}, got {self.placement!r}"
            )

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def __str__(self) -> str:
        link = "" if self.link_mbits is None else f" at {self.link_mbits:g} Mbit/s"
        delay = f" +{self.delay_ms:g} ms" if self.delay_ms else ""
        placement = "" if self.placement == "contiguous" else f" {self.placement}"
        return f"{self.num_nodes}x{self.ranks_per_node}{link}{delay}{placement}"


def _is_within(value: Any, least: float, most: float) -> bool:
    """Whether it is a number in that range; a suite may hold anything."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
