"""Units: which parameters are gathered together, where each rank holds only a shard of them between uses.

    root    |== embedding, head, whatever several blocks share ==================|
    block0      |== its own ==|                              |== its own ==|
    block1                    |== its own ==||== its own ==|
            --- forward --------------------> <------------------- backward ------

A block's parameters are whole only around its own forward and backward, which is right only if nothing outside of it
ever uses them; the root's stay whole for the micro-batch. A forward pass without values tells the two apart. The units
of ZeRO-3 (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from harness.parameters import LogicalParameter, logical_parameters
from harness.tensors_in_use import Operations, names_by_storage, storage_key, tensors_in
from harness.workload import Workload, in_compute_precision
from impls.native.parts.order_of_use import first_inputs, forward_without_values


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are gathered together, frozen ones included, in order of first use; those that no forward reaches
    come last. `module` is the block's name as in `model.named_modules()`, None for the root unit."""

    module: str | None
    parameters: tuple[LogicalParameter, ...]


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The units in the order in which forward enters them, the root first; a unit without parameters is left out, even
    the root. `untraced_because` says why everything is in the root unit, if the model asks for values;
    `transforms_functions` if forward runs torch.func. `of_norms` has for each call of a BatchNorm in training, in
    order, how many of the blocks that are units forward has come to by then."""

    units: tuple[Unit, ...]
    of_norms: tuple[int, ...] = ()
    transforms_functions: bool = False
    untraced_because: str | None = None


def plan_units(workload: Workload, data_degree: int) -> UnitPlan:
    """Each parameter of the model in exactly one unit; the same plan on every rank, since all of them look at the first
    data rank's share. ValueError if the workload's blocks are not modules inside its model.

    A block keeps a parameter if it is registered nowhere else and used nowhere else, and if forward enters the block
    once. Of blocks inside blocks only the outermost count. Hooks that gather must come before those of the module
    itself (`prepend=True`), as the pass's own do.
    """
    inputs = first_inputs(workload, data_degree)
    try:
        model = workload.model_without_memory()
    except Exception as error:  # whatever a builder does with tensors that have no values
        with torch.random.fork_rng(devices=[]):
            model = in_compute_precision(workload, workload.model())
        _outermost_blocks(workload, model)
        return _everything_in_root(logical_parameters(model, workload.decays), error)
    in_compute_precision(workload, model)
    parameters = logical_parameters(model, workload.decays)
    blocks = _outermost_blocks(workload, model)
    trace = _Trace(model, parameters, blocks)
    try:
        trace.run(inputs)
    except Exception as error:  # whatever a model does with tensors that have no values
        return _everything_in_root(parameters, error)
    units = _assigned(parameters, blocks, trace)
    names = {unit.module for unit in units}
    is_unit = [blocks[block][0] in names for block in trace.num_entries]
    return UnitPlan(
        units=units,
        of_norms=tuple(sum(is_unit[:num_entered]) for num_entered in trace.of_norms),
        transforms_functions=trace.transforms_functions,
    )


def _everything_in_root(parameters: tuple[LogicalParameter, ...], error: Exception) -> UnitPlan:
    units = (Unit(module=None, parameters=parameters),) if parameters else ()
    return UnitPlan(units=units, untraced_because=f"{type(error).__name__}: {error}")


def _assigned(
    parameters: Sequence[LogicalParameter], blocks: Mapping[nn.Module, tuple[str, ...]], trace: _Trace
) -> tuple[Unit, ...]:
    block_at = {name: block for block, names in blocks.items() for name in names}
    place_of_use = {name: place for place, name in enumerate(trace.uses)}
    members: dict[nn.Module | None, list[LogicalParameter]] = {None: [], **{block: [] for block in trace.num_entries}}
    for parameter in sorted(parameters, key=lambda p: place_of_use.get(p.name, len(place_of_use))):
        homes = {_block_around(name, block_at) for name in (parameter.name, *parameter.aliases)}
        home = homes.pop() if len(homes) == 1 else None
        at_home = all(active == (home,) for active in trace.uses.get(parameter.name, ()))
        keeps = home is not None and trace.num_entries[home] == 1 and at_home
        members[home if keeps else None].append(parameter)
    return tuple(
        Unit(module=None if block is None else blocks[block][0], parameters=tuple(found))
        for block, found in members.items()
        if found
    )


def _block_around(name: str, block_at: Mapping[str, nn.Module]) -> nn.Module | None:
    """The block that holds what is registered as `name`: `layers.0.norm.weight` lies in `layers.0`."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((block_at[prefix] for prefix in prefixes if prefix in block_at), None)


def _outermost_blocks(workload: Workload, model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """The blocks that lie in no other block, with all their names (the model's own is "", which begins no other)."""
    blocks = list(dict.fromkeys(workload.blocks(model)))
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for block in blocks:
        if block not in names:
            raise ValueError(
                f"workload {workload.name}: expected blocks that are modules inside the model, "
                f"got a {type(block).__name__} that is not"
            )
    nested = {module for block in blocks for module in block.modules() if module is not block}
    return {block: tuple(names[block]) for block in blocks if block not in nested}


class _Trace:
    """Which parameters a forward pass on the meta device uses, and which blocks are active when it does.

    A parameter is known by its storage, so that a view of it, kept for later, is a use of it as well.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[LogicalParameter], blocks: Mapping[nn.Module, object]
    ) -> None:
        self.uses: dict[str, set[tuple[nn.Module, ...]]] = {}  # in order of first use; by logical name
        self.num_entries: Counter[nn.Module] = Counter()  # in order of first entry
        self.transforms_functions = False
        self.of_norms: list[int] = []  # how many blocks have been entered when a BatchNorm is called
        self._model = model
        self._active: list[nn.Module] = []
        self._names_by_storage = names_by_storage(model, [parameter.name for parameter in parameters])
        for block in blocks:
            block.register_forward_pre_hook(self._enter, prepend=True)
            block.register_forward_hook(self._leave, always_call=True)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.register_forward_pre_hook(self._call_norm)

    def run(self, inputs: Tensor) -> None:
        with _Functions(self.note), Operations(self.note):
            outputs = forward_without_values(self._model, inputs)
        self.note(outputs)  # the loss uses what the model returns

    def note(self, value: object) -> None:
        """Any tensor in `value`, however nested, is used now."""
        self.transforms_functions |= torch._C._functorch.maybe_current_level() is not None
        for tensor in tensors_in(value):
            for name in self._names_by_storage.get(storage_key(tensor), ()):
                self.uses.setdefault(name, set()).add(tuple(self._active))

    def _call_norm(self, norm: nn.Module, _: object) -> None:
        if norm.training:  # one that a model keeps in evaluation waits for nobody
            self.of_norms.append(len(self.num_entries))

    def _enter(self, block: nn.Module, _: object) -> None:
        self.num_entries[block] += 1
        self._active.append(block)

    def _leave(self, *_: object) -> None:
        self._active.pop()


class _Functions(TorchFunctionMode):
    """Notes what every torch function called from Python is given: attributes of tensors too, and whole functions of
    which no operation need touch the argument."""

    def __init__(self, note: Callable[[object], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs))
        return func(*args, **(kwargs or {}))
