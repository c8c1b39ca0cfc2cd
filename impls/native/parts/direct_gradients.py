"""Weight gradients of linear and embedding layers, computed straight into the buckets.

Left to itself autograd makes each gradient in fresh memory, from which it must be copied to where it is reduced. A
layer served here writes its own: the first use in a step overwrites the place in the bucket, every further use (a tied
weight, a layer called twice, the next micro-batch) adds to it. Autograd still announces the parameter when all its uses
are done, with no gradient or with that of the uses that are not served; who listens adds that one.

A layer cannot tell why its backward runs: a loss that itself calls torch.autograd.grad through such a layer would write
the weight's gradient too, and must be trained without this.

Measured on the 17M GPT, one rank on one core: a step takes 1.00-1.03 of one that copies nothing; copied, 1.06-1.09.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Claim = Callable[[], bool]
"""Says whether a write to a gradient's place is the first of this step, which overwrites; any later one adds."""


class Place(NamedTuple):
    """Where the gradient of one parameter belongs: `view` has the parameter's shape."""

    view: Tensor
    claim: Claim


def write_directly(model: nn.Module, places: dict[str, Place]) -> None:
    """Has the linear and embedding layers of `model` write the gradients of the parameters named in `places` there.
    Layers that do more than the plain operation are left to autograd, and so are empty ones and those whose gradients
    somebody wants to see on the way."""
    by_parameter = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        if "forward" in vars(module) or not _is_plain(module):
            continue
        trained = {kind: p for kind, p in module.named_parameters(recurse=False) if p.requires_grad}
        found = {
            kind: place
            for kind, parameter in trained.items()
            if (place := places.get(by_parameter[id(parameter)])) and _can_be_written(parameter, place.view)
        }
        weight = found.get("weight")
        if weight is None:
            continue
        if isinstance(module, nn.Linear):
            module.forward = partial(_linear, module, weight, found.get("bias"))  # type: ignore[method-assign]
        elif isinstance(module, nn.Embedding):
            module.forward = partial(_embedding, module, weight)  # type: ignore[method-assign]


def _is_plain(module: nn.Module) -> bool:
    if type(module) is nn.Linear:
        return True
    if type(module) is nn.Embedding:
        special = (module.padding_idx, module.max_norm)
        return special == (None, None) and not (module.scale_grad_by_freq or module.sparse)
    return False


def _can_be_written(parameter: nn.Parameter, view: Tensor) -> bool:
    alike = view.is_contiguous() and view.dtype == parameter.dtype
    return alike and parameter.numel() > 0 and not parameter._backward_hooks


def _linear(module: nn.Linear, weight: Place, bias: Place | None, inputs: Tensor) -> Tensor:
    if torch.is_autocast_enabled(inputs.device.type):  # casts on the way, which the gradient would have to undo
        return nn.Linear.forward(module, inputs)
    output: Tensor = _Linear.apply(inputs, module.weight, module.bias, (weight, bias))  # type: ignore[no-untyped-call]
    return output


def _embedding(module: nn.Embedding, weight: Place, indices: Tensor) -> Tensor:
    output: Tensor = _Embedding.apply(indices, module.weight, weight)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, places: tuple[Place, Place | None]
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.places = places
        return nn.functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        weight_place, bias_place = ctx.places
        rows = gradient.reshape(-1, gradient.shape[-1])  # (samples, outputs)
        for_inputs = (rows @ weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
        transposed, flat_inputs = rows.t(), inputs.reshape(-1, inputs.shape[-1])
        if weight_place.claim():
            torch.mm(transposed, flat_inputs, out=weight_place.view)
        else:
            weight_place.view.addmm_(transposed, flat_inputs)
        if not ctx.needs_input_grad[2]:
            return for_inputs, None, None, None
        if bias_place is None:
            return for_inputs, None, rows.sum(0), None
        if bias_place.claim():
            torch.sum(rows, 0, out=bias_place.view)
        else:
            bias_place.view.add_(rows.sum(0))
        return for_inputs, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, place: Place) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.place = place
        return nn.functional.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (indices,) = ctx.saved_tensors
        if ctx.place.claim():
            ctx.place.view.zero_()
        ctx.place.view.index_add_(0, indices.flatten(), gradient.reshape(-1, gradient.shape[-1]))
        return None, None, None
