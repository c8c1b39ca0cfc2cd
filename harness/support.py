"""What an implementation supports, asked of it and not declared: its answers for small layouts and for the awkward
workloads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness import models
from harness.implementation import Implementation
from harness.layout import Layout
from harness.models.awkward import KINDS
from harness.workload import in_precision

_LAYOUTS = {
    "single": Layout(),
    "data": Layout(data=2),
    "shard": Layout(data=4, shard=2),
    "tensor": Layout(tensor=2),
    "pipeline": Layout(pipeline=2),
}
_CPU = torch.device("cpu")


def axes(kind: type[Implementation]) -> list[str]:
    """Which parallel degrees it takes, each tried alone on a plain workload of two micro-batches; `shard` is hybrid
    sharding."""
    workload = models.load("gpt:size=tiny,num_micro_batches=2")
    return [name for name, layout in _LAYOUTS.items() if not kind.unsupported(workload, layout, _CPU, {})]


def refusals(kind: type[Implementation]) -> Iterator[tuple[str, str]]:
    """The awkward workloads that it refuses on a layout it otherwise takes, with the reasons."""
    layout = next((_LAYOUTS[name] for name in axes(kind)[::-1]), Layout())
    for name in KINDS:
        text = f"awkward:kind={name}"
        precision = "fp32" if models.load(text).fixed_dtypes else "fp64"
        if reason := kind.unsupported(in_precision(models.load(text), precision), layout, _CPU, {}):
            yield name, reason
