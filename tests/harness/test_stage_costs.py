"""Cuts by every kind of partition, against all cuts there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import get_args

import pytest

from harness import models
from harness.block_costs import BlockCosts, analyse
from harness.partition import cut
from harness.stage_costs import Partition, activation_bytes, stage_costs, stages_of, state_bytes
from harness.workload import Workload

IN_FLIGHT = (3, 2, 1)


@pytest.fixture(scope="module")
def decoder() -> Workload:
    return models.load("gpt:size=17m,tied=true,global_batch_size=4,num_micro_batches=4,sequence_length=32")


@pytest.fixture(scope="module")
def blocks(decoder: Workload) -> tuple[BlockCosts, ...]:
    return analyse(decoder)


def by_hand(kind: Partition, blocks: Sequence[BlockCosts], stage: int, begin: int, end: int) -> float:
    """AdamW in fp32 holds 16 bytes a parameter; of tied ones a stage holds one."""
    here = blocks[begin:end]
    num_parameters = sum({p.name: p.num_elements for block in here for p in block.parameters}.values())
    if kind == "memory":
        activations = sum(block.kept_bytes for block in here) + (blocks[begin - 1].border_bytes if begin else 0)
        return 16 * num_parameters + IN_FLIGHT[stage] * (activations + here[-1].unkept_border_bytes)
    if kind == "time":
        return sum(range(begin, end))
    return {"uniform": len(here), "parameters": num_parameters, "flops": sum(block.flops for block in here)}[kind]


@pytest.mark.parametrize("kind", get_args(Partition))
def test_no_other_cut_has_a_cheaper_costliest_stage(
    kind: Partition, decoder: Workload, blocks: tuple[BlockCosts, ...]
) -> None:
    cost = stage_costs(decoder, blocks, IN_FLIGHT, seconds=range(len(blocks)))[kind]

    def worst(bounds: Sequence[int]) -> float:
        return max(by_hand(kind, blocks, stage, *ends) for stage, ends in enumerate(pairwise(bounds)))

    found = cut(len(blocks), 3, cost)
    cheapest = min(worst((0, *inner, len(blocks))) for inner in combinations(range(1, len(blocks)), 2))
    assert worst([0, *(stage.stop for stage in found)]) == cheapest
    for stage, of_stage in enumerate(found):
        assert cost(stage, of_stage.start, of_stage.stop) == by_hand(kind, blocks, stage, of_stage.start, of_stage.stop)


def test_a_head_counts_by_its_flops_and_an_embedding_does_not() -> None:
    """An embedding has as many parameters as a head and no FLOPs: stages alike in FLOPs are not alike in parameters."""
    workload = models.load("gpt:size=17m,global_batch_size=4,sequence_length=32")
    lengths = {kind: list(map(len, stages_of(workload, 2, kind, (2, 1)))) for kind in ("parameters", "flops")}
    assert lengths == {"parameters": [4, 4], "flops": [5, 3]}


def test_stages_that_hold_more_micro_batches_get_fewer_blocks() -> None:
    """12 layers whose activations outweigh their states; 1F1B on 4 stages, GPipe beside it."""
    workload = models.load("gpt:size=small,global_batch_size=64,num_micro_batches=4,sequence_length=512")
    under_1f1b = list(map(len, stages_of(workload, 4, "memory", (4, 3, 2, 1))))
    under_gpipe = list(map(len, stages_of(workload, 4, "memory", (4, 4, 4, 4))))
    assert under_1f1b[0] < under_gpipe[0]
    assert under_1f1b == sorted(under_1f1b)


def test_memory_of_a_stage_by_hand(decoder: Workload, blocks: tuple[BlockCosts, ...]) -> None:
    """The embedding and the head together: the tied vocabulary's states once."""
    num_parameters = sum({p.name: p.num_elements for block in blocks for p in block.parameters}.values())
    assert state_bytes(decoder, blocks)(0, 0, len(blocks)) == 16 * num_parameters
    assert activation_bytes(blocks)(0, 0, len(blocks)) == sum(block.kept_bytes for block in blocks)


def test_what_cannot_be_is_refused() -> None:
    workload = models.load("gpt:size=tiny")
    with pytest.raises(ValueError, match="expected from 1 to 4 stages for 4 blocks, got 5"):
        stages_of(workload, 5, "uniform", [1] * 5)
    with pytest.raises(
        ValueError, match="partition must be one of uniform, parameters, flops, time, memory, got 'luck'"
    ):
        stages_of(workload, 2, "luck", (2, 1))  # type: ignore[arg-type]
