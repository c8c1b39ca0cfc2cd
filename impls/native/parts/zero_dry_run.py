"""What the sharded optimizer lends its buckets in the course of one backward, on tensors without memory: when a slot is
claimed, a gradient has to wait, a sum is made. See harness.implementation.Preparation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from harness.layout import Layout
from harness.workload import Workload
from impls.native.parts.direct_gradients import Place, TrainingTask, write_directly
from impls.native.parts.gradient_shards import lent_slots, slot_bytes, staging_bytes
from impls.native.parts.zero_costs import comes_late, gradient_flats
from impls.native.parts.zero_plan import ZeroPlan


class LentInBackward:
    """Holds on to what is lent, as ShardedMemory and the exchange do until the next step."""

    def __init__(
        self, plan: ZeroPlan, workload: Workload, layout: Layout, *, shares_memory: bool, device: torch.device
    ):
        flats = gradient_flats(plan, workload)
        sizes = slot_bytes(flats, layout.shard_degree)
        self._plan, self._flats, self._device = plan, flats, device
        self._lent_slots = {} if shares_memory else {slot: sizes[slot] for slot in lent_slots(flats)}
        self._stagings = staging_bytes(flats, layout.shard_degree, shares_memory=shares_memory, device=device)
        self._awaited = [len(flat.plan.bucket.segments) for flat in plan.flats[: plan.num_trained]]
        self._next_to_reduce = 0
        self._held: list[Tensor] = []
        self._early: dict[int, list[Tensor]] = {}

    def claim(self, index: int) -> bool:
        """A gradient is written to its flat."""
        if num_bytes := self._lent_slots.pop(self._flats[index].slot, 0):
            self._hold(num_bytes)
        return True

    def is_open(self, index: int) -> bool:
        before = self._plan.flats[index].after_flat
        return before is None or before < self._next_to_reduce

    def ready(self, index: int, parameter: Tensor) -> None:
        """Autograd has announced a parameter of the flat."""
        if self.is_open(index):
            self.claim(index)
        else:
            self._early.setdefault(index, []).append(torch.empty_like(parameter))
        self._awaited[index] -= 1
        while self._next_to_reduce < len(self._awaited) and not self._awaited[self._next_to_reduce]:
            self._reduce(self._next_to_reduce)
            self._next_to_reduce += 1

    def _reduce(self, index: int) -> None:
        self.claim(index)
        self._early.pop(index, None)
        if self._plan.stage > 1:
            self._hold(self._flats[index].shard_bytes)
        if self._stagings:
            self._hold(self._stagings.pop())

    def _hold(self, num_bytes: int) -> None:
        self._held.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))


def prepare(
    model: nn.Module,
    gradients: Mapping[str, Tensor],
    *,
    plan: ZeroPlan,
    workload: Workload,
    layout: Layout,
    shares_memory: bool,
    direct: bool,
) -> Callable[[Tensor], None]:
    """Has `model` hold what is lent as its backward goes on, and with `direct` write gradients where they belong."""
    parameters, task, places = dict(model.named_parameters()), TrainingTask(), {}
    device = next(iter(parameters.values())).device
    lent = None
    if comes_late(plan, workload):
        lent = LentInBackward(plan, workload, layout, shares_memory=shares_memory, device=device)
    for index, flat in enumerate(plan.flats[: plan.num_trained]):
        for segment in flat.plan.bucket.segments:
            name = segment.parameter.name
            places[name] = Place(gradients[name], lambda: True)
            if lent is not None:
                places[name] = Place(gradients[name], partial(lent.claim, index), partial(lent.is_open, index))
                parameters[name].register_post_accumulate_grad_hook(partial(lent.ready, index))
    if direct:
        write_directly(model, places, task)
    return task.starts_at
