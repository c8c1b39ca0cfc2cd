"""Collectives by size and world: the backend's own, and ours over its messages and over shared memory."""

from __future__ import annotations

from typing import Any

import pytest

from harness.layout import Layout
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
