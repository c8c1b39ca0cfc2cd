"""Whether the regions of a tensor plan are what tensor parallelism takes them for, found by a pass without values.

    x -> | column-parallel -> slices -> row-parallel | -> summand        uncut parameters work on slices only

Gradients of uncut parameters of a region are summed over ranks, and so is that of the input of a region with several
column-parallel layers: what they do outside the slices would count once a rank.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.tensor_plan import ColumnParallel, ResolvedPlan, RowParallel, partial_parameters
from harness.tensors_in_use import Operations, storage_key, tensors_in

_META = torch.device("meta")


class _Kind(Enum):
    PARAMETER = "an uncut parameter of a region, or what is made of such alone"
    WHOLE = "what enters a region, and what is made of it before the column-parallel layers"
    SLICE = "what column-parallel layers yield"
    SUM = "what the row-parallel layer yields"


class NoRegion(ValueError):
    """A plan whose regions hold more than they may; the message is the reason, in one line."""


def check_regions(model: nn.Module, plan: ResolvedPlan, inputs: Tensor, *, cuts_sequence: bool = False) -> None:
    """NoRegion where a region has several row-parallel layers or lies in another, or where uncut parameters or the
    input act outside its slices; where `cuts_sequence`, the input of every region does, which is gathered where the
    region is called. `model` lies on the meta device and keeps the hooks that watch it. One that does not
    run without values may have no uncut parameters in its regions."""
    _check_nesting(plan)
    names = {name for name in partial_parameters(model, plan) if model.get_parameter(name).requires_grad}
    watch = _Watch(model, plan, names, cuts_sequence)
    try:
        with _META, Operations(watch.note, watch.made):
            model(inputs.to(_META))
    except NoRegion:
        raise
    except Exception as error:  # whatever a model does with tensors that have no values
        if names:
            raise NoRegion(
                f"tensor plan: {min(names)} lies beside cut layers and is not cut, and whether it works on their "
                f"slices only cannot be seen: the model does not run without values ({type(error).__name__})"
            ) from error


def _check_nesting(plan: ResolvedPlan) -> None:
    rows: dict[str, str] = {}
    for name, role in plan.roles.items():
        if isinstance(role, RowParallel):
            region = name.rpartition(".")[0]
            if region in rows:
                raise NoRegion(
                    f"tensor plan: {rows[region]} and {name} are row-parallel in one module: expected a module of its "
                    "own around each row-parallel layer and the column-parallel layers that feed it"
                )
            rows[region] = name
    for region, row in rows.items():
        if (outer := plan.region_of(region.rpartition(".")[0])) is not None and region:
            raise NoRegion(f"tensor plan: {row} lies within the module of {rows[outer]}, which is row-parallel as well")


class _Watch:
    """Follows through a pass of `model` what is whole, a slice or a sum. Tensors are known by their storage."""

    def __init__(self, model: nn.Module, plan: ResolvedPlan, names: set[str], cuts_sequence: bool) -> None:
        self._names = {storage_key(model.get_parameter(name)): name for name in names}
        self._parameters = {storage_key(parameter) for parameter in model.parameters()}
        self._kinds = dict.fromkeys(self._names, _Kind.PARAMETER)
        self._kept: list[Tensor] = []  # so that no storage's address is used twice
        self._entered: str | None = None
        self._in_cut_layer = False
        self._result: _Kind | None = None
        columns: dict[str, list[str]] = {}
        for name, role in plan.roles.items():
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._begin_layer)
            if isinstance(role, ColumnParallel):
                columns.setdefault(plan.region_of(name) or "", []).append(name)
            module.register_forward_hook(partial(self._end_layer, role))
        self._several = {region for region, layers in columns.items() if len(layers) > 1 or cuts_sequence}
        for region, layers in columns.items():
            for name in layers if region in self._several else ():
                model.get_submodule(name).register_forward_pre_hook(partial(self._check_input, region, name))
        for region in plan.regions:
            module = model.get_submodule(region)
            module.register_forward_pre_hook(partial(self._enter, region), prepend=True, with_kwargs=True)
            module.register_forward_hook(partial(self._leave, region))

    def note(self, value: object) -> None:
        if self._in_cut_layer:
            return
        found = {kind: tensor for tensor in tensors_in(value) if (kind := self._kind(tensor)) is not None}
        if _Kind.PARAMETER in found and _Kind.SLICE not in found and len(found) > 1:
            of_region = [self._names[key] for t in tensors_in(value) if (key := storage_key(t)) in self._names]
            raise NoRegion(
                f"tensor plan: {min(of_region or self._names.values())} lies beside cut layers and works "
                "outside their slices: expected it in no module of a row-parallel layer"
            )
        if {_Kind.WHOLE, _Kind.SLICE} <= found.keys():
            raise NoRegion(f"tensor plan: {self._where()} mixes what is whole with slices of column-parallel layers")
        if {_Kind.WHOLE, _Kind.SUM} <= found.keys() and self._entered in self._several:
            raise NoRegion(f"tensor plan: {self._where()} adds its input to what its row-parallel layer yields")
        order = (_Kind.SLICE, _Kind.SUM, _Kind.WHOLE, _Kind.PARAMETER)
        self._result = next((kind for kind in order if kind in found), None)

    def made(self, value: object) -> None:
        if self._in_cut_layer:
            self._kept.extend(tensors_in(value))
        else:
            self._mark(value, self._result)

    def _kind(self, tensor: Tensor) -> _Kind | None:
        key = storage_key(tensor)
        if key in self._kinds:
            return self._kinds[key]
        is_activation = tensor.requires_grad and key not in self._parameters
        return _Kind.WHOLE if is_activation else None

    def _mark(self, value: object, kind: _Kind | None) -> None:
        for tensor in tensors_in(value):
            self._kept.append(tensor)
            if kind is None:
                self._kinds.pop(storage_key(tensor), None)
            elif storage_key(tensor) not in self._parameters:
                self._kinds[storage_key(tensor)] = kind

    def _where(self) -> str:
        return "the model" if not self._entered else self._entered

    def _begin_layer(self, layer: nn.Module, args: Any) -> None:
        self._in_cut_layer = True

    def _end_layer(self, role: object, layer: nn.Module, args: Any, output: Tensor) -> None:
        self._in_cut_layer = False
        if isinstance(role, ColumnParallel):
            self._mark(output, _Kind.SLICE)
        elif isinstance(role, RowParallel):
            self._mark(output, None if self._entered is None else _Kind.SUM)

    def _check_input(self, region: str, name: str, layer: nn.Module, args: Any) -> None:
        if self._entered != region or self._kinds.get(storage_key(args[0])) is not _Kind.WHOLE:
            raise NoRegion(
                f"tensor plan: {name} takes something else than its region's input, which {region or 'the model'} is "
                "called with first: several column-parallel layers share that one"
            )

    def _enter(self, region: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._entered = region
        activations = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        self._mark(activations[:1], _Kind.WHOLE)

    def _leave(self, region: str, module: nn.Module, args: Any, output: Any) -> None:
        if region in self._several and any(self._kinds.get(storage_key(t)) is _Kind.WHOLE for t in tensors_in(output)):
            raise NoRegion(f"tensor plan: {self._where()} yields its input beside what its row-parallel layer yields")
        passing = (_Kind.WHOLE, _Kind.SUM)
        self._kinds = {key: kind for key, kind in self._kinds.items() if kind not in passing}
        self._entered = None
