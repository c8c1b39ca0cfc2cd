"""Collectives by size and world: the backend's own, and ours over its messages and over shared memory; and over nodes
with a slow link between them, in one level and in two."""

from __future__ import annotations

from typing import Any

import pytest

from harness.layout import Layout
from harness.topology import Topology
from suites.micro.conftest import Ranks, in_ranks

SIZES = {"4KiB": 2**12, "256KiB": 2**18, "4MiB": 2**22}
WORLDS = (2, 4)
MEANS = {
    "all_reduce": ("backend", "ring", "parameter_server", "shared_memory"),
    "reduce_scatter": ("backend", "process_group", "shared_memory"),
    "all_gather": ("backend", "process_group", "shared_memory"),
}


@in_ranks
@pytest.mark.parametrize("world_size", WORLDS, ids=lambda size: f"world{size}")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", [f"{name} by {means}" for name, all_means in MEANS.items() for means in all_means])
def test_collective(benchmark: Any, ranks: Ranks, way: str, size: str, world_size: int) -> None:
    name, _, means = way.partition(" by ")
    benchmark.group = f"{name} {size} world {world_size}"
    ranks.benchmark(benchmark, Layout(data=world_size), name=name, means=means, num_bytes=SIZES[size])


OVER_A_SLOW_LINK = Topology(num_nodes=2, ranks_per_node=2, link_mbits=200.0)
SIZES_OVER_NODES = {"256KiB": 2**18, "1MiB": 2**20, "4MiB": 2**22}


@in_ranks
@pytest.mark.parametrize("size", SIZES_OVER_NODES)
@pytest.mark.parametrize("means", ["backend", "two_levels"])
def test_all_reduce_over_nodes(benchmark: Any, ranks: Ranks, means: str, size: str) -> None:
    """On emulated nodes, which share this machine's processors: read the ratio of the two ways, no times."""
    benchmark.group = f"all_reduce {size} {OVER_A_SLOW_LINK}"
    options = {"name": "all_reduce", "means": means, "num_bytes": SIZES_OVER_NODES[size]}
    ranks.benchmark(benchmark, Layout(data=4), topology=OVER_A_SLOW_LINK, num_rounds=10, **options)
