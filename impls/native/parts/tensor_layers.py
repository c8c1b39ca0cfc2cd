"""The layers of tensor parallelism as autograd functions on one rank's slice.

              forward                           backward
    enter     x                                 the ranks' gradients summed
    column    x @ W_r' + b_r                    as usual, on the slice
    row       sum over ranks of x_r @ W_r', + b as usual, on the slice

With sequence parallelism x is this rank's piece of the sequence between regions: enter gathers the pieces and backward
sums and scatters their gradients; the sum of a row-parallel layer is scattered and its gradient gathered. Shoeybi et
al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".

[Note: Weight gradients meanwhile] While the gradients of a region's input are on their way its layers compute those of
their weights: nobody before them waits for these. Where one column-parallel layer takes the input alone it does both
itself; where several do, they leave their weights' to `enter`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from impls.native.parts.direct_gradients import Place, TrainingTask, write_product, write_row_sum
from impls.native.parts.tensor_exchange import Finish, TensorExchange

_SEQUENCE_DIM = 1


@dataclass(kw_only=True)
class TensorContext:
    """What the layers of one model on one rank share. `sizes` are the ranks' pieces of the sequence in the current
    forward, where it is cut (`cuts_sequence`)."""

    exchange: TensorExchange
    task: TrainingTask
    cuts_sequence: bool = False
    sizes: list[int] = field(default_factory=list)

    def start_enter(self, own: Tensor) -> Finish:
        """The forward of `enter`."""
        if not self.cuts_sequence:
            return lambda: own
        return self.exchange.start_gather(own, _SEQUENCE_DIM, self.sizes)

    def start_leave(self, own: Tensor) -> Finish:
        """The sum over ranks; the gradient of `enter`."""
        if not self.cuts_sequence:
            return self.exchange.start_sum(own)
        return self.exchange.start_scatter_sum(own, _SEQUENCE_DIM, self.sizes)


@dataclass(kw_only=True)
class CutLayer:
    """One layer of the plan on this rank. `enters` if a column-parallel layer alone takes its region's input; `first`
    is the first token of a part of the vocabulary. Its gradients go to their places; None leaves them to autograd."""

    context: TensorContext
    enters: bool = False
    first: int = 0
    weight: Place | None = None
    bias: Place | None = None


def enter(inputs: Tensor, context: TensorContext) -> Tensor:
    """(samples, length, width): the input of a region, whole."""
    output: Tensor = _Enter.apply(inputs, context)  # type: ignore[no-untyped-call]
    return output


def split_sequence(inputs: Tensor, context: TensorContext) -> Tensor:
    """(samples, length, ...): this rank's piece of what all ranks have whole."""
    num_ranks, length = context.exchange.num_ranks, inputs.shape[_SEQUENCE_DIM]
    each, more = divmod(length, num_ranks)
    context.sizes = [each + (rank < more) for rank in range(num_ranks)]
    output: Tensor = _SplitSequence.apply(inputs, context)  # type: ignore[no-untyped-call]
    return output


def gather_last(inputs: Tensor, sizes: list[int], context: TensorContext) -> Tensor:
    """(..., sum of sizes): the ranks' slices (..., size) side by side, with which each rank goes on alike."""
    output: Tensor = _GatherLast.apply(inputs, sizes, context)  # type: ignore[no-untyped-call]
    return output


def column_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: CutLayer) -> Tensor:
    """(..., this rank's output features) of `inputs` (..., input features)."""
    output: Tensor = _ColumnLinear.apply(inputs, weight, bias, layer)  # type: ignore[no-untyped-call]
    return output


def row_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: CutLayer) -> Tensor:
    """(..., output features), summed over ranks, of `inputs` (..., this rank's input features)."""
    output: Tensor = _RowLinear.apply(inputs, weight, bias, layer)  # type: ignore[no-untyped-call]
    return output


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, context: TensorContext) -> Tensor:
        ctx.context = context
        return context.start_enter(inputs)() if context.cuts_sequence else inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context: TensorContext = ctx.context
        room = context.exchange.room(gradient.shape, gradient)
        finish = context.start_leave(room.copy_(gradient))
        if not context.task.puts_off:
            context.task.catch_up()  # see [Note: Weight gradients meanwhile]
        return finish(), None


class _SplitSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, context: TensorContext) -> Tensor:
        ctx.context = context
        start, size = sum(context.sizes[: context.exchange.rank]), context.sizes[context.exchange.rank]
        return inputs.narrow(_SEQUENCE_DIM, start, size).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context: TensorContext = ctx.context
        return context.exchange.start_gather(gradient.contiguous(), _SEQUENCE_DIM, context.sizes)(), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, sizes: list[int], context: TensorContext) -> Tensor:
        ctx.begin, ctx.size = sum(sizes[: context.exchange.rank]), inputs.shape[-1]
        return context.exchange.start_gather(inputs.contiguous(), inputs.ndim - 1, sizes)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(-1, ctx.begin, ctx.size).contiguous(), None, None


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: CutLayer) -> Tensor:
        # A piece of the sequence is saved, not the whole: backward gathers it again.
        ctx.save_for_backward(inputs, weight)
        ctx.layer = layer
        whole = layer.context.start_enter(inputs)() if layer.enters else inputs
        return nn.functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        layer: CutLayer = ctx.layer
        context = layer.context
        rows = gradient.flatten(0, -2)
        if not layer.enters:
            for_inputs = (rows @ weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
            return for_inputs, *_weight_gradients(ctx, rows, inputs, waits=True), None
        whole = inputs
        if context.cuts_sequence and ctx.needs_input_grad[1]:
            whole = context.start_enter(inputs)()
        finish = None
        if ctx.needs_input_grad[0]:
            room = context.exchange.room((*gradient.shape[:-1], weight.shape[1]), gradient)
            torch.mm(rows, weight, out=room.view(-1, weight.shape[1]))
            finish = context.start_leave(room)
        for_weight, for_bias = _weight_gradients(ctx, rows, whole)
        return finish() if finish else None, for_weight, for_bias, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: CutLayer) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer = layer
        room = layer.context.exchange.room((*inputs.shape[:-1], weight.shape[0]), inputs)
        torch.mm(inputs.flatten(0, -2), weight.t(), out=room.view(-1, weight.shape[0]))
        total = layer.context.start_leave(room)()
        return total if bias is None else total.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        layer: CutLayer = ctx.layer
        own_rows = gradient.flatten(0, -2)
        whole = layer.context.start_enter(gradient.contiguous())()
        rows = whole.flatten(0, -2)
        for_inputs = (rows @ weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
        return for_inputs, *_weight_gradients(ctx, rows, inputs, own_rows), None


def _weight_gradients(
    ctx: Any, rows: Tensor, inputs: Tensor, bias_rows: Tensor | None = None, *, waits: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Of a layer's weight and bias, or None where they are written to their places: at once, or, where the layer
    `waits` or all do, by whoever catches up."""
    layer: CutLayer = ctx.layer
    task = layer.context.task
    is_running = task.is_running()
    for_weight = for_bias = None
    if ctx.needs_input_grad[1]:
        flat, place = inputs.flatten(0, -2), layer.weight
        if place is None or not (is_running and place.is_open()):
            for_weight = rows.t() @ flat
        elif waits or task.puts_off:
            task.put_off(partial(write_product, place, rows.t(), flat))
        else:
            write_product(place, rows.t(), flat)
    if ctx.needs_input_grad[2]:
        summed, place = rows if bias_rows is None else bias_rows, layer.bias
        if place is None or not (is_running and place.is_open()):
            for_bias = summed.sum(0)
        else:
            write_row_sum(place, summed)
    return for_weight, for_bias
