"""The cross-entropy of 512 tokens over a vocabulary of 8,192, forward and backward: whole, and shared out."""

from __future__ import annotations

from typing import Any

import pytest

from harness.layout import Layout
from suites.micro.conftest import Ranks, in_ranks


@in_ranks
@pytest.mark.parametrize(("means", "world_size"), [("whole", 1), ("process_group", 2), ("shared_memory", 2)], ids=str)
def test_cross_entropy(benchmark: Any, ranks: Ranks, means: str, world_size: int) -> None:
    benchmark.group = "cross_entropy"
    ranks.benchmark(benchmark, Layout(tensor=world_size), name="cross_entropy", means=means)
