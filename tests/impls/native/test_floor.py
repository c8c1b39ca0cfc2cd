"""The floor: what a rank computes and updates, without processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness import models
from harness.layout import Layout
from harness.measure.predicted_memory import registry
from harness.workload import Workload, in_precision
from impls.native.floor import ComputeFloor

TWO = Layout(data=2)


def workload() -> Workload:
    """Clipping would go by the norm of what is updated, and so differ."""
    loaded = in_precision(models.load("awkward:kind=unequal_tokens"), "fp64")
    return replace(loaded, training=replace(loaded.training, clip_norm=None))


def trained(**options: Any) -> ComputeFloor:
    """After a step, in this process: a floor has no use for a mesh."""
    work = workload()
    floor = ComputeFloor(work, TWO, None, torch.device("cpu"), **options)  # type: ignore[arg-type]
    floor.train_step(work.batch(0))
    return floor


def test_a_sharded_floor_updates_as_much_of_each_parameter_as_one_of_the_ranks_would() -> None:
    before = dict(workload().build_model().named_parameters())
    whole, half = trained().full_parameters(), trained(shards_update=True).full_parameters()
    for name, value in whole.items():
        updated = -(-value.numel() // 2)
        assert torch.equal(half[name].view(-1)[:updated], value.view(-1)[:updated]), name
        assert torch.equal(half[name].view(-1)[updated:], before[name].view(-1)[updated:]), name
    assert any(not torch.equal(whole[name], half[name]) for name in whole)


@pytest.mark.parametrize("options", [{}, {"shards_update": True}], ids=str)
def test_what_a_floor_holds_is_what_is_predicted(options: dict[str, Any]) -> None:
    floor = trained(**options)
    held = {category: list(tensors) for category, tensors in floor.memory_tensors().items()}
    sizes = {category: sum(t.numel() * t.element_size() for t in tensors) for category, tensors in held.items()}
    # Of Adam's states torch keeps a step count, one scalar a tensor, which no strategy counts.
    sizes["optimizer_states"] -= sum(t.element_size() for t in held["optimizer_states"] if not t.ndim)
    predicted = ComputeFloor.predicted_memory(floor.workload, registry(floor.workload), TWO, options)
    assert sizes == predicted
