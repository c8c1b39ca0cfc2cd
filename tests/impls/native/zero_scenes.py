"""native.zero as it is, but for one thing that must not matter, or with eyes in it. All of them train rightly."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from harness.implementation import StepOutput
from harness.workload import Batch
from impls.native.parts.gradient_shards import Then
from impls.native.zero import NativeShardedOptimizer
from tests.impls.native.odd_blocks import SIDE_WIDTH


class WithoutOverlap(NativeShardedOptimizer):
    """Every exchange is waited for where it is started."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        exchange, gathers = self.memory.exchange, self.memory.gathers
        start_sum, start_gather = exchange.start, gathers.start

        def sum_now(index: int, into: Tensor, *, add: bool, then: Then | None = None) -> None:
            start_sum(index, into, add=add, then=then)
            exchange.wait(index)

        def gather_now(index: int) -> None:
            start_gather(index)
            gathers.wait(index)

        exchange.start = sum_now  # type: ignore[method-assign]
        gathers.start = gather_now  # type: ignore[method-assign]


class BlocksComeAndGo(NativeShardedOptimizer):
    """Stage 3: no block shows its parameters once its forward has ended, nor any between steps."""

    def train_step(self, batch: Batch) -> StepOutput:
        assert self.units is not None
        blocks = [unit for unit in self.units._units if unit.module is not None]
        seen = []

        def look(*_: object) -> None:
            seen.append(sum(bool(torch.isfinite(unit.places[0].parameter.flatten()[0])) for unit in blocks))

        hooks = [unit.module.register_forward_hook(look) for unit in blocks if unit.module is not None]
        output = super().train_step(batch)
        for hook in hooks:
            hook.remove()
        assert seen == [0] * len(batch.micro_batches) * len(blocks), seen  # freed by then
        assert all(bool(torch.isnan(unit.places[0].parameter).all()) for unit in blocks), (
            "a block is there between steps"
        )
        return output


class HoldsNothingInAdvance(NativeShardedOptimizer):
    """Over the process group: no slot has memory before anybody needs it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        held = [tensor.untyped_storage().nbytes() for tensor in self.memory.tensors()["communication_buffers"]]
        assert held and not any(held), f"slots hold {held} bytes before the first step"


class KeepsNoGraph(NativeShardedOptimizer):
    """Stage 3: what the loss does not reach of a forward is gone when the step is over."""

    def train_step(self, batch: Batch) -> StepOutput:
        output = super().train_step(batch)
        gc.collect()
        alive = [t for t in gc.get_objects() if type(t) is Tensor and t.shape[-1:] == (SIDE_WIDTH,)]
        assert not alive, f"{len(alive)} tensors of an output that nobody used"
        return output


class SavesNothingWhole(NativeShardedOptimizer):
    """Stage 3: the rank's own memory between steps holds shards, and no parameter whole."""

    def train_step(self, batch: Batch) -> StepOutput:
        output = super().train_step(batch)
        own = sum(tensor.numel() for tensor in self.memory.tensors()["parameters"])
        whole = sum(flat.plan.num_padded_elements for flat in self.plan.flats)
        assert own * self.shard_group.size() == whole, (own, whole)
        return output
