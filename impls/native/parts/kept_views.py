"""Views of parameters that a module keeps from its construction (`self.transposed = self.weight.t()`): once parameters
live in flat buffers, such a view shows their old memory, which nobody trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


class KeptViews:
    """Those of `module` as it was built, to be looked for before its parameters are taken over. ValueError if
    parameters have elements in common: they would be torn apart."""

    def __init__(self, module: nn.Module, whose: str) -> None:
        self._module, self._whose = module, whose
        placed = sorted((_extent(parameter), name) for name, parameter in module.named_parameters())
        parameters = dict(module.named_parameters())
        near: list[tuple[_Extent, str]] = []  # those that reach as far as the next one's begin
        for extent, other in placed:
            near = [(before, one) for before, one in near if before.end > extent.begin]
            for _, one in near:
                if _share_elements(parameters[one], parameters[other]):
                    raise ValueError(
                        f"{whose}: expected parameters that share no memory, got {one} and {other}, which do; "
                        f"make them one"
                    )
            near.append((extent, other))
        self._suspects: dict[str, tuple[Tensor, str]] = {}  # where it is kept: the view and its parameter
        for place, tensor in kept_tensors(module):
            kept = _extent(tensor)
            for extent, name in placed:
                if _overlap(kept, extent) and _share_elements(tensor, parameters[name]):
                    self._suspects[place] = tensor, name
                    break

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


def _tensors_in(value: object, place: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in `value` and where it is, however nested; what holds itself is entered once."""
    if isinstance(value, Tensor):
        yield place, value
        return
    items: Iterable[tuple[str, object]] = ()
    if isinstance(value, Mapping):
        items = [(f"{place}[{key!r}]" if place else str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{place}[{index}]", item) for index, item in enumerate(value)]
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(f"{place}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    if id(value) not in around:
        for where, item in items:
            yield from _tensors_in(item, where, (*around, id(value)))


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


def _share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether a byte belongs to both: views with strides may lie between each other."""
    extents = _extent(one), _extent(other)
    if not _overlap(*extents):
        return False
    begin = min(extent.begin for extent in extents)
    is_of_one = torch.zeros(max(extent.end for extent in extents) - begin, dtype=torch.bool)
    _bytes_of(one, is_of_one, begin).fill_(True)
    return bool(_bytes_of(other, is_of_one, begin).any())


def _bytes_of(tensor: Tensor, memory: Tensor, begin: int) -> Tensor:
    """What `memory` (bytes from `begin` on,) has for the bytes of the tensor's elements."""
    # Along a stride of 0 there is one element alone.
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    return memory.as_strided([*sizes, tensor.itemsize], [*strides, 1], tensor.data_ptr() - begin)
