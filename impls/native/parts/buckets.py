"""Buckets: parameters of one dtype laid out one after another in a flat buffer, so that a reduction and an optimizer
update are each one operation on one tensor.

    flat parameters | w3 | b3 | w2 | b2 |     gradients lie at the same places of a second flat buffer
    a bucket        [ w3 . w2 | b3 . b2 ]     inside a bucket the decayed parameters come first

No padding anywhere: a bucket holds exactly its parameters' elements, so bytes on the wire are the formula's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.parameters import LogicalParameter
from impls.native.parts import flat_memory
from impls.native.parts.flat_memory import is_dense


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The place of one parameter in a bucket, in elements: [start, stop); empty where the parameter is."""

    parameter: LogicalParameter
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Which parameters one bucket holds and where."""

    dtype: torch.dtype
    segments: tuple[Segment, ...]

    @property
    def num_elements(self) -> int:
        return self.segments[-1].stop if self.segments else 0


def plan_buckets(
    parameters: Sequence[LogicalParameter],
    capacity_bytes: int,
    kind: Callable[[str], object] = lambda name: None,
    *,
    least_bytes: int | None = None,
) -> tuple[BucketPlan, ...]:
    """Fills buckets in the given order, each with one dtype, one `kind` of parameter by name, and at most
    `capacity_bytes`; a larger parameter gets one of its own. With `least_bytes` the last buckets get smaller and
    smaller, down to that: of each, little is left to wait for, or to find room for, when backward ends. ValueError for
    a capacity below one byte."""
    if capacity_bytes < 1:
        raise ValueError(f"bucket capacity must be at least 1 byte, got {capacity_bytes}")
    filling: dict[tuple[torch.dtype, object], list[LogicalParameter]] = {}
    full: list[list[LogicalParameter]] = []
    bytes_left = sum(parameter.num_bytes for parameter in parameters)
    limit = _limit(bytes_left, capacity_bytes, least_bytes)
    for parameter in parameters:
        alike = parameter.dtype, kind(parameter.name)
        bucket = filling.setdefault(alike, [])
        filled = sum(p.num_bytes for p in bucket)
        if bucket and filled + parameter.num_bytes > limit:
            full.append(bucket)
            bytes_left -= filled
            limit = _limit(bytes_left, capacity_bytes, least_bytes)
            bucket = filling[alike] = []
        bucket.append(parameter)
    full += filling.values()
    # A bucket is complete when its last parameter is: order by that, so that they complete one after another.
    position = {parameter.name: index for index, parameter in enumerate(parameters)}
    full.sort(key=lambda bucket: position[bucket[-1].name])
    return tuple(_lay_out(bucket) for bucket in full)


def _limit(bytes_left: int, capacity_bytes: int, least_bytes: int | None) -> int:
    """Of the next bucket, where `bytes_left` are in none yet."""
    if least_bytes is None:
        return capacity_bytes
    return min(capacity_bytes, max(least_bytes, bytes_left // 2))


def _lay_out(bucket: Sequence[LogicalParameter]) -> BucketPlan:
    segments, offset = [], 0
    for parameter in sorted(bucket, key=lambda parameter: not parameter.decayed):
        segments.append(Segment(parameter=parameter, start=offset, stop=offset + parameter.num_elements))
        offset += parameter.num_elements
    return BucketPlan(dtype=bucket[0].dtype, segments=tuple(segments))


def view_like(flat: Tensor, segment: Segment, like: Tensor) -> Tensor:
    """The segment of `flat` with the shape of `like`, and with its strides where those are dense (a transposed or
    channels-last parameter keeps its memory layout)."""
    piece = flat[segment.start : segment.stop]
    return piece.as_strided(like.shape, like.stride()) if is_dense(like) else piece.view(like.shape)


def flatten_parameters(plan: BucketPlan, parameters: dict[str, nn.Parameter], device: torch.device) -> Tensor:
    """A flat copy of the bucket's parameters, which become views of it."""
    flat = flat_memory.zeros(plan.num_elements, plan.dtype, device)
    with torch.no_grad():
        for segment in plan.segments:
            parameter = parameters[segment.parameter.name]
            view = view_like(flat, segment, parameter)
            view.copy_(parameter)
            parameter.data = view
    return flat


def refuse_sparse_gradients(model: nn.Module, whose: str) -> None:
    """ValueError if a layer of `model` yields gradients that have no place in a flat buffer."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"{whose} reduces dense gradients: {name} is an embedding with sparse=True")
