from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import random_regions


def drawing_blocks(num_blocks: int) -> list[nn.Module]:
    blocks: list[nn.Module] = [nn.Dropout(0.5) for _ in range(num_blocks)]
    random_regions.give_states(blocks)
    return blocks


def drawn(blocks: list[nn.Module], seed: int) -> list[Tensor]:
    random_regions.begin(seed)
    return [block(torch.ones(64)) for block in blocks]


def test_a_block_draws_the_same_whether_or_not_those_before_it_are_computed() -> None:
    blocks = drawing_blocks(3)
    everything = drawn(blocks, seed=5)
    assert torch.equal(drawn(blocks[2:], seed=5)[0], everything[2])


def test_blocks_and_micro_batches_draw_apart() -> None:
    blocks = drawing_blocks(3)
    masks = [tuple(mask.tolist()) for seed in (5, 6, 7) for mask in drawn(blocks, seed)]
    assert len(set(masks)) == len(masks)


def test_computed_again_a_block_draws_the_same() -> None:
    (block,) = drawing_blocks(1)
    weight = torch.ones(64, requires_grad=True)
    random_regions.begin(5)
    output = checkpoint(lambda w: block(w * w), weight, use_reentrant=False)
    torch.manual_seed(0)
    output.sum().backward()
    assert torch.equal(weight.grad, 2 * output.detach())  # the mask's scale, where it lets through
