"""The closed form of fairscale.fsdp: what holds of it whatever runs. Needs no FairScale."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness import implementation, models
from harness.layout import Layout
from harness.measure.predicted_memory import predicted, registry
from harness.parameters import replicated_state_bytes
from impls.fairscale.fsdp import FairScaleFullySharded
from impls.fairscale.parts.fully_sharded_costs import block_prefixes, sent_bytes

GPT = "gpt:size=tiny,global_batch_size=8"


def test_one_rank_holds_the_states_of_the_model_and_sends_nothing() -> None:
    workload = models.load(GPT)
    parameters = registry(workload)
    states = FairScaleFullySharded.predicted_memory(workload, parameters, Layout(), {})
    assert states == replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)
    assert FairScaleFullySharded.predicted_wire_bytes(workload, parameters, Layout(), {}) == 0


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_ranks_together_hold_the_states_and_at_most_a_rank_less_one_of_padding_a_parameter(ranks: int) -> None:
    workload = models.load(GPT)
    parameters = registry(workload)
    whole = replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)
    held = FairScaleFullySharded.predicted_memory(workload, parameters, Layout(data=ranks), {})
    assert held is not None
    padding = (ranks - 1) * len(parameters) * 4
    for category, most in (("parameters", padding), ("gradients", padding), ("optimizer_states", 2 * padding)):
        assert 0 <= ranks * held[category] - whole[category] <= most


@pytest.mark.parametrize(("ranks", "num_micro_batches"), [(2, 1), (4, 1), (2, 2), (3, 2)])
def test_blocks_travel_three_times_or_twice_and_the_root_twice(ranks: int, num_micro_batches: int) -> None:
    """By hand: 3 x (W-1)/W of the padded parameters of blocks, and 2 x of the root's, for each micro-batch."""
    loaded = models.load(f"{GPT},num_micro_batches={num_micro_batches}")
    # All of this model is in blocks: the first and the last one are left to the root.
    workload = replace(loaded, blocks=lambda model: list(loaded.blocks(model))[1:-1])
    parameters, layout = registry(workload), Layout(data=ranks)
    prefixes = tuple(block_prefixes(workload, workload.model_without_memory()))
    padded = {p.name: ranks * -(-p.num_elements // ranks) * 4 for p in parameters}
    blocks = sum(size for name, size in padded.items() if name.startswith(prefixes))
    root = sum(padded.values()) - blocks
    assert min(blocks, root) > 0
    for options, times in (({}, 3), ({"reshard_after_forward": False}, 2)):
        sent = FairScaleFullySharded.predicted_wire_bytes(workload, parameters, layout, options)
        assert sent == num_micro_batches * (ranks - 1) * (times * blocks + 2 * root) // ranks


def test_the_norm_and_the_first_ranks_buffers_come_on_top() -> None:
    plain, clipped = models.load(GPT), models.load(f"{GPT},clip_norm=1.0")
    layout, parameters = Layout(data=4), registry(plain)
    without = FairScaleFullySharded.predicted_wire_bytes(plain, parameters, layout, {})
    assert FairScaleFullySharded.predicted_wire_bytes(clipped, parameters, layout, {}) == (without or 0) + 3 * 8
    buffered = models.load("awkward:kind=buffers")
    assert buffered.buffer_bytes() > 0
    shards = sum(4 * -(-p.num_elements // 4) * p.dtype.itemsize for p in registry(buffered))
    sent = sent_bytes(buffered, registry(buffered), layout, reshards=False)
    assert (sent - buffered.buffer_bytes()) % 3 == 0
    assert sent >= buffered.buffer_bytes() + 2 * 3 * shards // 4


def test_no_peak_is_claimed_that_nobody_has_measured() -> None:
    workload, layout = models.load(GPT), Layout(data=2)
    kind = implementation.load("fairscale.fsdp")
    figures = predicted(workload, kind, layout, {})
    assert "memory.predicted_parameter_bytes" in figures
    assert "memory.predicted_peak_bytes" not in figures
    assert "never been measured" in kind.unpredicted(workload, registry(workload), layout, {})["peak"]
