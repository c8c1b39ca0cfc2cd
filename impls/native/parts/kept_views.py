"""Views of parameters that a module keeps from its construction (`self.transposed = self.weight.t()`): once parameters
live in flat buffers, such a view shows their old memory, which nobody trains."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn


class KeptViews:
    """Those of `module` as it was built, to be looked for before its parameters are taken over. ValueError if
    parameters overlap in memory: they would be torn apart."""

    def __init__(self, module: nn.Module, whose: str) -> None:
        self._module, self._whose = module, whose
        extents = sorted(
            (_extent(parameter), name) for name, parameter in module.named_parameters() if parameter.numel()
        )
        for (extent, one), (next_extent, other) in pairwise(extents):
            if _overlap(extent, next_extent):
                raise ValueError(
                    f"{whose}: expected parameters that share no memory, got {one} and {other}, which do; make them one"
                )
        self._suspects: dict[str, tuple[Tensor, str]] = {}  # where it is kept: the view and its parameter
        for place, tensor in kept_tensors(module):
            kept = _extent(tensor)
            behind = bisect_left(extents, kept.end, key=lambda found: found[0].begin)
            if behind and _overlap(kept, extents[behind - 1][0]):
                self._suspects[place] = tensor, extents[behind - 1][1]

    def check(self) -> None:
        """After a forward, which may have put others in their place. RuntimeError if one is kept still."""
        still = dict(kept_tensors(self._module)) if self._suspects else {}
        for place, (view, parameter) in self._suspects.items():
            if still.get(place) is view:
                raise RuntimeError(
                    f"{self._whose}: {place} was made of parameter {parameter} when the model was built, and "
                    f"parameters have moved to flat buffers since: make it in forward"
                )
        self._suspects = {}


def kept_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers and plain attributes that are tensors or hold some, and where they are kept."""
    parameters = {id(parameter) for parameter in module.parameters()}
    for path, part in module.named_modules():
        registered = ("_parameters", "_modules")
        attributes = {name: value for name, value in vars(part).items() if name not in registered}
        for name, tensor in _tensors_in(attributes | dict(attributes.pop("_buffers", {}))):
            if id(tensor) not in parameters:
                yield f"{path}.{name}".lstrip("."), tensor


def _tensors_in(value: object, place: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, f"{place}[{key!r}]" if place else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(item, f"{place}[{index}]")


class _Extent(NamedTuple):
    begin: int  # an address; those of different devices do not meet
    end: int


def _extent(tensor: Tensor) -> _Extent:
    if not tensor.numel() or tensor.layout is not torch.strided or tensor.is_meta:
        return _Extent(0, 0)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _Extent(tensor.data_ptr(), tensor.data_ptr() + span * tensor.itemsize)


def _overlap(one: _Extent, other: _Extent) -> bool:
    return max(one.begin, other.begin) < min(one.end, other.end)
