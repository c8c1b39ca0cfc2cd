"""Where to cut a chain of blocks into pipeline stages: contiguous, no stage empty, the costliest as cheap as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

StageCost = Callable[[int, int, int], float]
"""(stage, begin, end): what blocks [begin, end) cost as that stage."""


def additive(costs: Sequence[float]) -> StageCost:
    """Of a stage the sum of its blocks' `costs`, wherever it stands."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    return lambda stage, begin, end: sums[end] - sums[begin]


def cut(num_blocks: int, num_stages: int, cost: StageCost) -> tuple[range, ...]:
    """The blocks of each stage, in order. Of all cuts whose costliest stage is the cheapest, one with the least sum of
    squares: what is left over is spread evenly. ValueError where there are fewer blocks than stages."""
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(f"partition: expected from 1 to {num_blocks} stages for {num_blocks} blocks, got {num_stages}")
    # best[end]: the best cut of the first `end` blocks into the stages so far, as (costliest, squares, bounds)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(num_stages):
        blocks_left = num_stages - stage - 1
        best = {
            end: min(
                (max(worst, own), squares + own * own, (*bounds, end))
                for begin, (worst, squares, bounds) in best.items()
                if begin < end
                for own in (cost(stage, begin, end),)
            )
            for end in range(stage + 1, num_blocks - blocks_left + 1)
        }
    _, _, bounds = best[num_blocks]
    return tuple(range(begin, end) for begin, end in pairwise(bounds))


def imbalance(stages: Sequence[range], cost: StageCost) -> float:
    """The costliest stage's cost over the mean of all, less one: 0 where they are alike."""
    costs = [cost(stage, blocks.start, blocks.stop) for stage, blocks in enumerate(stages)]
    mean = sum(costs) / len(costs)
    return max(costs) / mean - 1.0 if mean else 0.0
