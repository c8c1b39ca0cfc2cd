"""Mesh: one rank's view of a running layout: its place, its process groups and its node."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.layout import Axis, Coordinates, Layout
from harness.placement import seats
from harness.topology import Topology

if TYPE_CHECKING:
    from harness.implementation import CollectiveObserver


class Mesh:
    """Built on every rank after `init_process_group`, in the same order everywhere; `timeout` bounds each collective.

    `observer` is set only in instrumented runs: a transport that bypasses torch.distributed reports there.
    """

    def __init__(
        self,
        layout: Layout,
        topology: Topology,
        rank: int,
        device: torch.device,
        *,
        observer: CollectiveObserver | None = None,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self.seats = seats(layout, topology)
        self.layout = layout
        self.topology = topology
        self.rank = rank
        self.device = device
        self.observer = observer
        self._timeout = timeout
        self._groups: dict[tuple[str, int], dist.ProcessGroup] = {}
        self._parts: list[dist.ProcessGroup] = []

    @property
    def coordinates(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    def ranks(self, axis: Axis) -> tuple[int, ...]:
        """The ranks of this rank's group along `axis`, in axis order."""
        return next(group for group in self.layout.groups(axis) if self.rank in group)

    def group(self, axis: Axis, *, lane: int = 0) -> dist.ProcessGroup:
        """This rank's process group along `axis`. Another `lane` is another group over the same ranks, for operations
        whose order must not depend on the first one's. Collective at first use: every rank must ask in the same order.
        """
        if (axis, lane) not in self._groups:
            for ranks in self.layout.groups(axis):
                group = dist.new_group(list(ranks), timeout=self._timeout)
                if self.rank in ranks:
                    self._groups[axis, lane] = group
        return self._groups[axis, lane]

    def part(self, axis: Axis, places: Sequence[int]) -> dist.ProcessGroup:
        """Of this rank's group along `axis` the ranks at `places`, the same for all. Collective over all ranks: each
        group along the axis gets its own."""
        own: dist.ProcessGroup | None = None
        for ranks in self.layout.groups(axis):
            group = dist.new_group([ranks[place] for place in places], timeout=self._timeout)
            own = group if self.rank in ranks else own
        assert own is not None
        if self.ranks(axis).index(self.rank) in places:
            self._parts.append(own)
        return own

    def levels(self, axis: Axis) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Two groups of ranks of this rank's group along `axis`, new ones at each call: those on its node, and those
        that have its place on each node. Collective over all ranks. ValueError where nodes have different numbers of a
        group's ranks."""
        own: list[dist.ProcessGroup] = []
        for ranks in self.layout.groups(axis):
            by_node = self.seats.by_node(ranks)
            for members in (*by_node, *zip(*by_node, strict=True)):
                group = dist.new_group(list(members), timeout=self._timeout)
                if self.rank in members:
                    own.append(group)
        self._parts += own
        inside, across = own
        return inside, across

    def on_one_node(self, axis: Axis) -> bool:
        """Whether this rank's group along `axis` lies within one node."""
        return self.seats.on_one_node(self.ranks(axis))

    def close(self) -> None:
        """Ends the groups this mesh has made. Collective."""
        for group in (*self._groups.values(), *self._parts):
            dist.destroy_process_group(group)
        self._groups.clear()
        self._parts.clear()

    def device_mesh(self) -> DeviceMesh:
        """torch's own mesh over the same ranks, with dims pipeline, data, tensor. Collective."""
        return init_device_mesh(
            self.device.type,
            (self.layout.pipeline, self.layout.data, self.layout.tensor),
            mesh_dim_names=("pipeline", "data", "tensor"),
        )
