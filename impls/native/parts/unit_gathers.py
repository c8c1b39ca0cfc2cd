"""Stage 3 of the sharded optimizer: has each unit's parameters there while they are needed, the next unit's on their
way meanwhile, and nobody else's.

    forward    enter 1 | gather 2 |  enter 2: free 1, gather 3 | ...
    backward   gradient reaches the output of 3: gather 2 | of 2: free 3, gather 1 | ...

[Note: One order] Every rank gathers the same units in the same order, whatever its own data make its model do: a unit
that a rank passes over is gathered all the same, because its peers cannot go on without this rank's shard. What is
still in its slot is not gathered again: the last blocks of forward are the first of backward.

[Note: Fixed places] A unit is always gathered into the same slot, so tensors that autograd has saved (a transposed
weight, say) point at the right values again by the time backward reads them. While a unit is away its parameters read
as NaN: who uses them outside their block's forward sees it at once.

[Note: When backward is done with a block] Autograd runs nodes that are ready in the reverse order of their making.
All nodes of block k were made after those of block k-1 and wait only for later ones: when backward comes to block k-1,
block k is done. That it has come there three things tell, whichever is first: a gradient at a tensor that has left the
block, what autograd has saved of a parameter is asked for, a parameter has its gradient. Outputs are not all that
leaves a block: a loss that it keeps for later (that of a mixture of experts, say) is an attribute, or was put into what
the block was given, and autograd may turn to it first. The other two are for what leaves in ways that nobody sees (a
closure, a global list); where such a block is also computed again (activation checkpointing), or saves under hooks of
its own, which take the place of these, nothing tells in time.

[Note: Function transforms] torch.func refuses to run where hooks watch what autograd saves: a model that uses it goes
without them.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"; the triggers are those
of Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from harness.tensors_in_use import kept_in, tensors_in
from impls.native.parts.parameter_gathers import ParameterGathers


class PlacedParameter(NamedTuple):
    """`view` is what the parameter reads as while its unit is there."""

    name: str
    parameter: nn.Parameter
    view: Tensor


@dataclass(frozen=True, kw_only=True)
class PlacedUnit:
    """A unit on this rank: `module` is its block, None for the root unit; `flats` are gathered for it, in this
    order."""

    module: nn.Module | None
    name: str
    slot: int
    flats: tuple[int, ...]
    places: tuple[PlacedParameter, ...]


class _OfUnit(NamedTuple):
    """What autograd has saved of a unit's parameter."""

    unit: int
    tensor: Tensor


class UnitGathers:
    """`units` are in forward order, the root first. `done_in_backward(unit)` is called once per backward pass for each
    block, last block first, when its gradients are complete. With `reshards` units are hidden after their forward;
    `watches_saved` unless the model is one of [Note: Function transforms]; `of_norms` is UnitPlan's."""

    def __init__(
        self,
        units: Sequence[PlacedUnit],
        gathers: ParameterGathers,
        *,
        reshards: bool,
        watches_saved: bool,
        of_norms: Sequence[int],
        done_in_backward: Callable[[int], None],
        whose: str,
    ) -> None:
        self._whose = whose
        self._units = units
        self._gathers = gathers
        self._reshards = reshards
        self._watches_saved = watches_saved
        self._done_in_backward = done_in_backward
        self._occupants: dict[int, int] = {}  # slot: the unit whose parameters are in it or on their way there
        self._in_flight: set[int] = set()
        self._away: dict[torch.dtype, Tensor] = {}  # what parameters read as that are not there
        self._slot_of_memory = {view.untyped_storage()._cdata: u.slot for u in units for _, _, view in u.places}
        self._versions = {name: parameter._version for unit in units for name, parameter, _ in unit.places}
        self._of_norms = of_norms
        self._num_norms = 0  # calls of them in this forward
        self._num_entered = 0
        self._called: set[int] = set()  # in this forward; others may have been passed over
        self._is_alone = False  # no backward follows
        self._is_backward = False
        self._backward_at = 0  # the block that backward is in, or the number of units before it has begun
        self._comes_again = False
        self._given: set[int] = set()  # ids of the tensors that a block is given
        self._hooks: list[RemovableHandle] = []  # at what has left a block: a model may keep that for longer
        for index, unit in enumerate(units):
            if unit.module is not None:
                # Before the module's own: they may use the parameters.
                unit.module.register_forward_pre_hook(
                    lambda _module, *inputs, k=index: self._enter(k, inputs), prepend=True, with_kwargs=True
                )
                unit.module.register_forward_hook(
                    lambda _module, args, kwargs, output, k=index: self._leave(k, (args, kwargs), output),
                    with_kwargs=True,
                )
        self.forget()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The forward of a micro-batch goes on."""
        self._num_entered = self._num_norms = 0
        self._called.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._enter(0)
        with saved_tensors_hooks(self._pack, self._unpack) if self._watches_saved else nullcontext():
            yield

    @contextmanager
    def forward_alone(self) -> Iterator[None]:
        """The forward of a micro-batch that no backward follows goes on."""
        self._is_alone = True
        with self.forward():
            yield
        self._pass_up_to(len(self._units) - 1)
        self._is_alone = False
        self.forget()

    def begin_backward(self, *, comes_again: bool) -> None:
        """The loss is there; see [Note: One order]. `comes_again` if the step has further micro-batches: what lies in
        the slots at the end is then kept for them."""
        self._pass_up_to(len(self._units) - 1)
        self._is_backward, self._backward_at, self._comes_again = True, len(self._units), comes_again

    def enter_backward(self, unit: int) -> None:
        """Backward has come to the unit; see [Note: When backward is done with a block]."""
        if not self._is_backward or not 0 < unit < self._backward_at:
            return
        self._reach(unit)
        self._show(unit)
        if unit > 1:
            self._gather(unit - 1)

    def norm_is_called(self) -> Callable[[], None]:
        """Forward comes to a layer that waits for its peers, which may be in a block that this rank passes over, and
        returns what to do before the layer waits in backward; see [Note: Peers that wait in backward] of zero.py."""
        if self._num_norms < len(self._of_norms):
            self._pass_up_to(self._of_norms[self._num_norms])
        self._num_norms += 1
        return partial(self._leave_later, self._num_entered - 1)

    def end_backward(self) -> None:
        """Autograd has returned."""
        self._reach(0)
        self._is_backward = False

    def forget(self) -> None:
        """The shards are about to change: whatever lies in the slots is out of date."""
        for unit in range(len(self._units)):
            self._await(unit)
            self._hide(unit)
            self._release(unit)
        self._occupants.clear()

    def gathered(self) -> Iterator[Tensor]:
        """Every flat, whole, one after another. Collective; between steps."""
        for unit in range(len(self._units)):
            self._gather(unit)
            self._await(unit)
            # Copies: a caller's NumPy would nail the memory down.
            yield from (self._gathers.full(flat).clone() for flat in self._units[unit].flats)
        self.forget()

    def _enter(self, unit: int, inputs: Any = ()) -> None:
        self._given = {id(tensor) for tensor in tensors_in(inputs)}
        if unit < self._num_entered:
            if self._occupants.get(self._units[unit].slot) != unit:
                raise RuntimeError(self._why_away(unit))
            self._await(unit)  # called from backward, which has only started to gather it
        else:
            self._pass_up_to(unit)
        self._called.add(unit)
        self._show(unit)
        if unit == self._num_entered - 1 < len(self._units) - 1:
            self._gather(unit + 1)

    def _pass_up_to(self, unit: int) -> None:
        while self._num_entered <= unit:
            self._gather(self._num_entered)
            self._await(self._num_entered)
            self._num_entered += 1

    def _leave(self, unit: int, inputs: Any, output: Any) -> None:
        """See [Note: When backward is done with a block]."""
        if self._is_alone and self._reshards:
            self._hide(unit)
        if not torch.is_grad_enabled():
            return
        module = self._units[unit].module
        assert module is not None
        added = [tensor for tensor in tensors_in(inputs) if id(tensor) not in self._given]
        left = {id(tensor): tensor for tensor in (*tensors_in(output), *added, *kept_in(module))}
        for tensor in left.values():
            if tensor.grad_fn is not None:
                self._hooks.append(tensor.register_hook(lambda _gradient, k=unit: self.enter_backward(k)))
        if self._reshards:
            self._hide(unit)

    def _leave_later(self, unit: int) -> None:
        """Backward is past all units after this one."""
        if unit > 0:
            self.enter_backward(unit)
        elif self._is_backward:
            self._reach(0)

    def _pack(self, tensor: Tensor) -> Tensor | _OfUnit:
        # Not the tensor itself: what a node has made would refer to the node, and live as long as that.
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            return tensor
        slot = self._slot_of_memory.get(tensor.untyped_storage()._cdata)
        return tensor if slot is None else _OfUnit(self._occupants[slot], tensor)

    def _unpack(self, saved: Tensor | _OfUnit) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        unit, tensor = saved
        self.enter_backward(unit)
        if self._occupants.get(self._units[unit].slot) != unit:
            raise RuntimeError(self._why_away(unit))
        return tensor

    def _why_away(self, unit: int) -> str:
        """Of a unit whose parameters are wanted and were freed."""
        name = self._units[unit].name
        if self._is_backward and unit < self._backward_at:
            return (
                f"{self._whose}: {name} is called again after its parameters were freed, in backward: of the blocks "
                f"that "
                f"a checkpoint computes again two are there at a time, and one where it is re-entrant; checkpoint "
                f"fewer at once, or keep them with reshard_after_forward=false"
            )
        if self._is_backward:
            earlier = self._units[self._backward_at].name
            found = f"backward comes to {name} after {earlier}, and forward called {name} after that"
        elif unit in self._called:
            found = f"{name} is called a second time, and was called once"
        else:
            found = f"{name} is called after {self._units[self._num_entered - 1].name}, and was called before that"
        return (
            f"{self._whose}: {found} when the model was looked at: stage 3 gathers blocks that are called once, in one "
            f"order; leave others out of the workload's blocks"
        )

    def _reach(self, unit: int) -> None:
        """Backward goes on from block to block, through those that its own gradient passes over."""
        while self._backward_at > unit:
            if self._backward_at < len(self._units):
                self._finish(self._backward_at)
            self._backward_at -= 1
            self._gather(self._backward_at)
            self._await(self._backward_at)

    def _finish(self, unit: int) -> None:
        self._hide(unit)
        if not (self._comes_again or any(self._units[u].slot == self._units[unit].slot for u in range(1, unit))):
            self._release(unit)
        self._done_in_backward(unit)

    def _release(self, unit: int) -> None:
        """Nothing is in the unit's slot, and nothing on its way there."""
        slot = self._units[unit].slot
        self._occupants.pop(slot, None)
        for other in self._units:
            if other.slot == slot:
                for flat in other.flats:
                    self._gathers.release(flat)

    def _show(self, unit: int) -> None:
        for _, parameter, view in self._units[unit].places:
            parameter.data = view

    def _hide(self, unit: int) -> None:
        for name, parameter, view in self._units[unit].places:
            if parameter._version != self._versions[name]:
                raise RuntimeError(
                    f"{self._whose}: the model writes to parameter {name} in place; under stage 3 that is lost, since "
                    f"parameters are copies that come and go"
                )
            if view.dtype not in self._away:
                nothing = torch.nan if view.dtype.is_floating_point or view.dtype.is_complex else 0
                self._away[view.dtype] = torch.full((), nothing, dtype=view.dtype, device=view.device)
            parameter.data = self._away[view.dtype].expand(view.shape)

    def _gather(self, unit: int) -> None:
        """Starts what is not in its slot."""
        slot = self._units[unit].slot
        previous = self._occupants.get(slot)
        if previous == unit:
            return
        if previous is not None:
            self._await(previous)
        self._occupants[slot] = unit
        self._in_flight.add(unit)
        for flat in self._units[unit].flats:
            self._gathers.start(flat)

    def _await(self, unit: int) -> None:
        if unit in self._in_flight:
            self._in_flight.discard(unit)
            for flat in self._units[unit].flats:
                self._gathers.wait(flat)
