"""What the sharded optimizer lends its buckets in the course of one backward, on tensors without memory: when a slot is
claimed, a gradient has to wait, a sum is made, a block's parameters go. See harness.implementation.Preparation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from harness.layout import Layout
from harness.workload import Workload
from impls.native.parts.direct_gradients import Place, TrainingTask, write_directly
from impls.native.parts.gradient_shards import MAX_IN_FLIGHT, staging_bytes
from impls.native.parts.zero_costs import comes_late, gradient_flats, parameter_flats
from impls.native.parts.zero_plan import ZeroPlan


class LentInBackward:
    """Holds what is lent while it is, as ShardedMemory, the exchange and UnitGathers do."""

    def __init__(
        self, plan: ZeroPlan, workload: Workload, layout: Layout, *, shares_memory: bool, device: torch.device
    ):
        self._plan, self._device = plan, device
        self._num_ranks, self._shares_memory = layout.shard_degree, shares_memory
        self._flats, self._gathered = gradient_flats(plan, workload), parameter_flats(plan)
        self._num_micro_batches = workload.training.num_micro_batches
        self._sums_come_late = comes_late(plan, workload)
        self._awaited = [len(flat.plan.bucket.segments) for flat in plan.flats[: plan.num_trained]]
        self._next_to_reduce = 0
        self._early: dict[int, list[Tensor]] = {}
        self._sums: list[Tensor] = []
        self._filling: dict[int, Tensor] = {}  # the memory of a flat's slot
        self._in_flight: dict[int, Tensor] = {}  # room for a flat's pieces, the oldest first
        self._parameters: dict[int, Tensor] = {}  # those of a unit

    def begin_backward(self) -> None:
        """The loss is there: the last units of forward lie in their slots, and what the micro-batch before has started
        last may be on its way still."""
        if self._num_micro_batches > 1 and self._plan.stage > 1:
            for index in range(len(self._flats))[-MAX_IN_FLIGHT:]:
                self._start(index, is_first_sum=self._num_micro_batches == 2)
        if self._plan.shards_parameters and not self._shares_memory:
            for unit in {self._plan.slot_of_unit(unit): unit for unit in range(len(self._plan.modules))}.values():
                self._gather(unit)

    def claim(self, index: int) -> bool:
        """A gradient is written to its flat: whoever had its slot before has been sent."""
        self._come_to(self._plan.flats[index].unit)
        flat = self._flats[index]
        for earlier in [i for i in self._in_flight if self._flats[i].slot == flat.slot]:
            self._finish(earlier)
        self._fill(index)
        return True

    def _fill(self, index: int) -> None:
        flat = self._flats[index]
        if flat.lent and not self._shares_memory and index not in self._filling:
            self._filling[index] = self._memory(self._num_ranks * flat.shard_bytes)

    def is_open(self, index: int) -> bool:
        before = self._plan.flats[index].after_flat
        return before is None or before < self._next_to_reduce

    def ready(self, index: int, parameter: Tensor) -> None:
        """Autograd has announced a parameter of the flat."""
        self._come_to(self._plan.flats[index].unit)
        if self.is_open(index):
            self.claim(index)
        else:
            self._early.setdefault(index, []).append(torch.empty_like(parameter))
        self._awaited[index] -= 1
        while self._next_to_reduce < len(self._awaited) and not self._awaited[self._next_to_reduce]:
            # Of the units of stage 3 only these: that backward is done with others is known when it comes to the next.
            if self._plan.flats[self._next_to_reduce].unit > 1:
                break
            self._reduce_next()

    def _come_to(self, unit: int) -> None:
        """Backward is done with all later units. Of the root unit's gradients, a head's say, that tells nothing."""
        if unit == 0:
            return
        while self._next_to_reduce < len(self._flats) and self._plan.flats[self._next_to_reduce].unit > max(unit, 1):
            done = self._plan.flats[self._next_to_reduce].unit
            successor = self._leave(done)
            while self._next_to_reduce < len(self._flats) and self._plan.flats[self._next_to_reduce].unit == done:
                self._reduce_next()
            if successor is not None:
                self._gather(successor)

    def _reduce_next(self) -> None:
        index = self._next_to_reduce
        self._next_to_reduce += 1
        flat = self._flats[index]
        self.claim(index)
        self._early.pop(index, None)
        if self._sums_come_late:
            self._sums.append(self._memory(flat.shard_bytes))
        self._start(index, is_first_sum=self._sums_come_late)

    def _start(self, index: int, *, is_first_sum: bool) -> None:
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._finish(next(iter(self._in_flight)))
        self._fill(index)
        num_bytes = staging_bytes(
            self._flats[index], self._num_ranks, takes_one=is_first_sum, shares_memory=self._shares_memory
        )
        self._in_flight[index] = self._memory(num_bytes)
        if self._num_ranks == 1:
            self._finish(index)

    def _finish(self, index: int) -> None:
        """The exchange of the flat is over."""
        del self._in_flight[index]
        self._filling.pop(index, None)

    def _leave(self, unit: int) -> int | None:
        """Backward is done with a block, and its parameters go; where micro-batches follow the last ones stay. Returns
        the block that is to be gathered in its place."""
        slot_of_unit = self._plan.slot_of_unit
        successor = next((u for u in range(unit - 1, 0, -1) if slot_of_unit(u) == slot_of_unit(unit)), None)
        if successor is not None or self._num_micro_batches == 1:
            self._parameters.pop(unit, None)
        return None if self._shares_memory else successor

    def _gather(self, unit: int) -> None:
        flats = [flat for flat, planned in zip(self._gathered, self._plan.flats, strict=True) if planned.unit == unit]
        self._parameters[unit] = self._memory(sum(self._num_ranks * flat.shard_bytes for flat in flats))

    def _memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


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
    lent = LentInBackward(plan, workload, layout, shares_memory=shares_memory, device=device)
    for index, flat in enumerate(plan.flats[: plan.num_trained]):
        for segment in flat.plan.bucket.segments:
            name = segment.parameter.name
            places[name] = Place(gradients[name], partial(lent.claim, index), partial(lent.is_open, index))
            parameters[name].register_post_accumulate_grad_hook(partial(lent.ready, index))
    if direct:
        write_directly(model, places, task)

    def begin_backward(loss: Tensor) -> None:
        task.starts_at(loss)
        lent.begin_backward()

    return begin_backward
