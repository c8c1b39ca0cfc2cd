"""Which tensors share elements, and which a module keeps beside its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


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


class Extent(NamedTuple):
    begin: int  # an address; those of different devices do not meet
    end: int


def extent_of(tensor: Tensor) -> Extent:
    if not tensor.numel() or tensor.layout is not torch.strided or tensor.untyped_storage().device.type == "meta":
        return Extent(0, 0)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Extent(tensor.data_ptr(), tensor.data_ptr() + span * tensor.itemsize)


def overlap(one: Extent, other: Extent) -> bool:
    return max(one.begin, other.begin) < min(one.end, other.end)


def share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether a byte belongs to both: views with strides may lie between each other."""
    extents = extent_of(one), extent_of(other)
    if not overlap(*extents):
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
