"""What the sharded optimizer lends its buckets in the course of one backward, on tensors without memory: when a slot is
claimed, a gradient has to wait, a sum is made, a block's parameters come and go. See
harness.implementation.Preparation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from harness.layout import Layout
from harness.tensors_in_use import tensors_in
from harness.workload import Workload
from impls.native.parts.direct_gradients import Place, TrainingTask, write_directly
from impls.native.parts.gradient_shards import MAX_IN_FLIGHT, staging_bytes
from impls.native.parts.zero_costs import comes_late, gradient_flats, parameter_flats
from impls.native.parts.zero_plan import ZeroPlan


class LentInBackward:
    """Holds what is lent while it is, as NativeShardedOptimizer, the exchange and UnitGathers do."""

    def __init__(
        self, plan: ZeroPlan, workload: Workload, layout: Layout, *, shares_memory: bool, device: torch.device
    ):
        self._plan, self._device = plan, device
        self._num_ranks, self._shares_memory = layout.shard_degree, shares_memory
        self._flats, self._gathered = gradient_flats(plan, workload), parameter_flats(plan)
        self._comes_again = workload.training.num_micro_batches > 1
        self._is_first_sum_before = workload.training.num_micro_batches == 2
        self._backward_synchronises = workload.synchronise_batch_norm and layout.data > 1
        self._sums_come_late = comes_late(plan, workload)
        self._awaited = [len(flat.plan.bucket.segments) for flat in plan.flats[: plan.num_trained]]
        self._next_to_reduce = 0
        self._backward_at = len(plan.modules)
        self._early: dict[int, list[Tensor]] = {}
        self._sums: list[Tensor] = []
        self._filling: dict[int, Tensor] = {}  # the memory of a flat's slot
        self._in_flight: dict[int, Tensor] = {}  # room for a flat's pieces, the oldest first
        self._occupants: dict[int, int] = {}  # of units' slots
        self._parameters: dict[int, Tensor] = {}  # by the slot of a flat

    def begin_backward(self) -> None:
        """The loss is there: the last units of forward lie in their slots, and what the micro-batch before has started
        last may be on its way still."""
        if self._comes_again and self._plan.stage > 1:
            for index in range(len(self._flats))[-MAX_IN_FLIGHT:]:
                self._start(index, is_first_sum=self._is_first_sum_before)
        if self._plan.shards_parameters and not self._shares_memory:
            units = range(len(self._plan.modules))
            lies_there: dict[int, int] = {}  # bytes by the slot of a flat
            for unit in (*units, *reversed(units), *units) if self._comes_again else units:
                lies_there |= self._sizes(unit)
                self._occupants[self._plan.slot_of_unit(unit)] = unit
            self._parameters = {slot: self._memory(num_bytes) for slot, num_bytes in lies_there.items()}

    def claim(self, index: int) -> bool:
        """A gradient is written to its flat: whoever had its slot before has been sent."""
        self.come_to(self._plan.flats[index].unit)
        self._fill(index)
        return True

    def is_open(self, index: int) -> bool:
        before = self._plan.flats[index].after_flat
        if self._backward_synchronises and self._plan.stage > 1:
            return before is None and not self._comes_again
        return before is None or before < self._next_to_reduce

    def ready(self, index: int, parameter: Tensor) -> None:
        """Autograd has announced a parameter of the flat."""
        self.come_to(self._plan.flats[index].unit)
        if self.is_open(index):
            self.claim(index)
        else:
            self._early.setdefault(index, []).append(torch.empty_like(parameter))
        self._awaited[index] -= 1
        while self._is_due(self._next_to_reduce):
            self._reduce_next()

    def come_to(self, unit: int) -> None:
        """Backward is done with all later units. Of the root unit's gradients, a head's say, that tells nothing."""
        if not 0 < unit < self._backward_at:
            return
        self._reach(unit)
        if unit > 1:
            self._gather(unit - 1)

    def end_backward(self) -> None:
        """Autograd returns: what has no gradient by now gets none."""
        self._reach(0)
        while self._next_to_reduce < len(self._awaited):
            self._reduce_next()

    def _is_due(self, index: int) -> bool:
        if index == len(self._awaited) or self._awaited[index] or self._plan.flats[index].unit:
            return False
        if self._backward_synchronises:
            return self._plan.stage < 3 and index < MAX_IN_FLIGHT and self.is_open(index)
        return True

    def _reach(self, unit: int) -> None:
        while self._backward_at > unit:
            if self._backward_at < len(self._plan.modules):
                self._leave(self._backward_at)
            self._backward_at -= 1
            self._gather(self._backward_at)

    def _leave(self, unit: int) -> None:
        """Backward is done with a block. Its parameters stay in their slot for the next block to take their place, or
        for the next micro-batch; else they go."""
        slot = self._plan.slot_of_unit(unit)
        if not (self._comes_again or any(self._plan.slot_of_unit(u) == slot for u in range(1, unit))):
            for flat in self._plan.flats:
                if flat.unit and self._plan.slot_of_unit(flat.unit) == slot:
                    self._parameters.pop(flat.parameter_slot, None)
        while self._next_to_reduce < len(self._flats) and self._plan.flats[self._next_to_reduce].unit >= unit:
            self._reduce_next()

    def _gather(self, unit: int) -> None:
        slot = self._plan.slot_of_unit(unit)
        if self._shares_memory or not self._plan.shards_parameters or self._occupants.get(slot) == unit:
            return
        self._occupants[slot] = unit
        for flat_slot, num_bytes in self._sizes(unit).items():
            if flat_slot not in self._parameters or self._parameters[flat_slot].nbytes != num_bytes:
                self._parameters.pop(flat_slot, None)
                self._parameters[flat_slot] = self._memory(num_bytes)

    def _sizes(self, unit: int) -> dict[int, int]:
        """What the unit's gathered flats take, by their slots."""
        return {
            flat.slot: self._num_ranks * flat.shard_bytes
            for flat, planned in zip(self._gathered, self._plan.flats, strict=True)
            if planned.unit == unit
        }

    def _reduce_next(self) -> None:
        index = self._next_to_reduce
        self._next_to_reduce += 1
        self._fill(index)
        self._early.pop(index, None)
        if self._sums_come_late:
            self._sums.append(self._memory(self._flats[index].shard_bytes))
        self._start(index, is_first_sum=self._sums_come_late)

    def _fill(self, index: int) -> None:
        flat = self._flats[index]
        for earlier in [i for i in self._in_flight if self._flats[i].slot == flat.slot and i != index]:
            self._finish(earlier)
        if flat.lent and not self._shares_memory and index not in self._filling:
            self._filling[index] = self._memory(self._num_ranks * flat.shard_bytes)

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
        """The exchange of the flat is over. The block in which sums of several are made (256 KiB at most) is not
        foreseen."""
        del self._in_flight[index]
        self._filling.pop(index, None)

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
    modules = dict(model.named_modules())
    for unit, module in enumerate(plan.modules):
        if module is not None:
            modules[module].register_forward_hook(partial(_watch_outputs, partial(lent.come_to, unit)))

    def begin_backward(loss: Tensor) -> None:
        task.starts_at(loss)
        lent.begin_backward()
        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(lent.end_backward))

    return begin_backward


def _watch_outputs(comes: Callable[[], None], _module: nn.Module, _inputs: object, output: object) -> None:
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.register_hook(lambda _: comes())
