"""What a rank holds beside its shards in the course of one micro-batch under DeepSpeed's stage 3, on tensors without
memory, where it gathers all that it lacks ahead and keeps it until backward: see harness.implementation.Preparation.

    forward    | received, all of it           |          gone when the last module that needs any has begun
               | a | b | c | d |                          each parameter, copied out of that
    backward   | a | b | c |                              d goes once its gradient is in the bucket
    sum        | gradients by rank | a copy of them |     gloo's reduce-scatter is an all-reduce on a copy
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from harness.parameters import LogicalParameter


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """`gathered` are the parameters that are not whole between steps, `trained` those that get gradients, of which
    `bucket_elements` are reduced together, in `sum_dtype`; with `scatters` in copies of them. The bucket is of that
    dtype already; where there is none, gradients are cast to it one and all (`casts`)."""

    gathered: Sequence[LogicalParameter]
    trained: Sequence[LogicalParameter]
    num_ranks: int
    bucket_elements: int
    scatters: bool
    casts: bool
    sum_dtype: torch.dtype


class GatheredInStep:
    """Holds what DeepSpeed does while it does."""

    def __init__(self, gathering: Gathering, device: torch.device) -> None:
        self._gathering, self._device = gathering, device
        self._elements = {parameter.name: parameter.num_elements for parameter in gathering.trained}
        self._received: list[Tensor] = []
        self._whole: dict[str, Tensor] = {}
        self._done_with: str | None = None
        self._filling: list[str] = []

    def begin_forward(self) -> None:
        for parameter in self._gathering.gathered:
            self._received.append(self._memory(self._padded(parameter.num_elements), parameter.dtype))
            self._whole[parameter.name] = self._memory(parameter.num_elements, parameter.dtype)

    def begin_last_module(self) -> None:
        self._received.clear()

    def ready(self, parameter: Tensor, name: str) -> None:
        """Autograd has made a gradient, which goes into the bucket."""
        self._whole.pop(self._done_with or "", None)  # its module is left by now
        self._done_with = name
        filled = sum(self._elements[other] for other in self._filling)
        if self._filling and filled + self._elements[name] > self._gathering.bucket_elements:
            self._reduce(parameter.dtype)
        self._filling.append(name)
        parameter.grad = None

    def end_backward(self, dtype: torch.dtype) -> None:
        self._reduce(dtype)
        self._whole.clear()

    def _reduce(self, dtype: torch.dtype) -> None:
        sum_dtype, scatters = self._gathering.sum_dtype, self._gathering.scatters
        cast, by_rank = [], []
        for name in self._filling:
            if self._gathering.casts and sum_dtype != dtype:
                cast.append(self._memory(self._elements[name], sum_dtype))
            if scatters:
                by_rank.append(self._memory(self._padded(self._elements[name]), sum_dtype))
        copies = [torch.empty_like(tensor) for tensor in by_rank]
        del cast, by_rank, copies
        self._filling.clear()

    def _padded(self, num_elements: int) -> int:
        return self._gathering.num_ranks * -(-num_elements // self._gathering.num_ranks)

    def _memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, device=self._device)


def prepare(model: nn.Module, gradients: Mapping[str, Tensor], *, gathering: Gathering) -> Callable[[Tensor], None]:
    """Has `model` hold what is gathered and summed as its forward and its backward go on."""
    parameters = dict(model.named_parameters())
    first = next(iter(parameters.values()))
    dtype, lent = first.dtype, GatheredInStep(gathering, first.device)
    for name in gradients:
        parameters[name].grad = None
        parameters[name].register_post_accumulate_grad_hook(partial(lent.ready, name=name))
    needed = {id(parameters[parameter.name]) for parameter in gathering.gathered}
    holders = [m for m in model.modules() if any(id(p) in needed for p in m.parameters(recurse=False))]
    model.register_forward_pre_hook(lambda *_: lent.begin_forward())
    for module in holders[-1:]:
        module.register_forward_pre_hook(lambda *_: lent.begin_last_module())

    def watch_backward(loss: Tensor) -> None:
        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(partial(lent.end_backward, dtype)))

    return watch_backward
