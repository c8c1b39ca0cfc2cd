"""Schedules of 8 ranks and 64 micro-batches: every rank's actions, and when each would happen."""

from __future__ import annotations

from typing import Any

import pytest

from impls.native.parts.schedules import make

NUM_RANKS, NUM_MICRO_BATCHES = 8, 64


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_h2"])
def test_schedule(benchmark: Any, name: str) -> None:
    num_chunks = 2 if name == "interleaved_1f1b" else 1

    def generate() -> int:
        schedule = make(name, num_ranks=NUM_RANKS, num_micro_batches=NUM_MICRO_BATCHES, num_chunks=num_chunks)
        return sum(1 for rank in range(NUM_RANKS) for _ in schedule.actions(rank))

    benchmark.group = "schedule"
    num_actions = benchmark.pedantic(generate, rounds=30, iterations=1, warmup_rounds=2)
    assert num_actions >= 2 * NUM_RANKS * NUM_MICRO_BATCHES * num_chunks
