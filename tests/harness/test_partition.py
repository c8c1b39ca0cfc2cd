"""Cuts of a chain into stages."""

from itertools import combinations, pairwise

import pytest

from harness.partition import additive, cut, imbalance


def test_equal_blocks_are_shared_out_evenly() -> None:
    assert [len(blocks) for blocks in cut(7, 3, additive([1.0] * 7))] in ([3, 2, 2], [2, 3, 2], [2, 2, 3])


def test_the_costliest_stage_is_as_cheap_as_any_cut_makes_it() -> None:
    costs = [5.0, 1.0, 1.0, 4.0, 2.0, 2.0, 3.0, 1.0]
    for num_stages in range(1, 9):
        stages = cut(8, num_stages, additive(costs))
        assert [block for blocks in stages for block in blocks] == list(range(8))
        worst = max(sum(costs[block] for block in blocks) for blocks in stages)
        bounds = ((0, *inner, 8) for inner in combinations(range(1, 8), num_stages - 1))
        assert worst == min(max(sum(costs[a:b]) for a, b in pairwise(c)) for c in bounds)


def test_a_stage_may_cost_more_the_earlier_it_stands() -> None:
    """In-flight activations, say: the first of two stages holds two micro-batches."""
    stages = cut(6, 2, lambda stage, begin, end: (2 - stage) * (end - begin))
    assert stages == (range(2), range(2, 6))
    assert imbalance(stages, lambda stage, begin, end: (2 - stage) * (end - begin)) == 0.0


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="expected from 1 to 3 stages for 3 blocks, got 4"):
        cut(3, 4, additive([1.0] * 3))
