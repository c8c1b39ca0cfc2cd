"""Embedding and cross-entropy over a vocabulary of which each rank holds a part: neither the whole embedding nor the
whole logits ever lie on one rank.

A rank embeds the tokens that are its own and zeros for all others; the sum over ranks is the embedding. Of the logits
each rank needs from its peers three numbers a token: its largest, the sum of exponentials relative to that, and the
target's logit if the target is its own. Shoeybi et al. 2019, "Megatron-LM".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.data import IGNORE_INDEX
from harness.tensors_in_use import storage_key
from harness.workload import Workload, in_compute_precision
from impls.native.parts.order_of_use import first_inputs, forward_without_values
from impls.native.parts.tensor_layers import CutLayer, TensorContext


def embedding(indices: Tensor, weight: Tensor, layer: CutLayer) -> Tensor:
    """(..., width) of `indices` (...); `weight` (this rank's part, width) begins with token `layer.first`."""
    output: Tensor = _Embedding.apply(indices, weight, layer)  # type: ignore[no-untyped-call]
    return output


def cross_entropy_sum(logits: Tensor, targets: Tensor, first: int, context: TensorContext) -> Tensor:
    """The sum over valid targets, in fp32 at least; `logits` (..., this rank's part) begin with token `first`. The same
    bits on all ranks."""
    total: Tensor = _CrossEntropy.apply(logits, targets, first, context)  # type: ignore[no-untyped-call]
    return total


def yields_logits(workload: Workload, name: str, data_degree: int) -> bool:
    """Whether what the workload's model yields is what its layer `name` yields, with the whole vocabulary and nothing
    done to it; not where the model does not run without values."""
    made: list[tuple[Tensor, int]] = []
    try:
        model = in_compute_precision(workload, workload.model_without_memory())
        head = model.get_submodule(name)
        head.register_forward_hook(lambda module, inputs, output: made.append((output, output._version)))
        output = forward_without_values(model, first_inputs(workload, data_degree))
    except Exception:  # whatever a model does with tensors that have no values
        return False
    if not isinstance(output, Tensor) or len(made) != 1:
        return False
    logits, version = made[0]
    return (
        storage_key(output) == storage_key(logits)
        and output._version == version
        and (output.shape[-1], output.stride(-1)) == (logits.shape[-1], logits.stride(-1))
    )


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, layer: CutLayer) -> Tensor:
        local = indices - layer.first
        is_own = (local >= 0) & (local < len(weight))
        local = local.masked_fill(~is_own, 0)
        ctx.save_for_backward(local, is_own)
        ctx.layer, ctx.shape = layer, weight.shape
        exchange = layer.context.exchange
        room = exchange.room((*indices.shape, weight.shape[1]), weight)
        if len(weight):
            torch.mul(nn.functional.embedding(local, weight), is_own.unsqueeze(-1), out=room)
        else:
            room.zero_()
        return exchange.start_sum(room)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None]:
        local, is_own = ctx.saved_tensors
        place = ctx.layer.weight
        writes = place is not None and ctx.layer.context.task.is_running() and place.is_open()
        if not writes:
            into = gradient.new_zeros(ctx.shape)
        else:
            into = place.view
            if place.claim():
                into.zero_()
        if len(into):
            # Tokens of other ranks add zeros to the first row, so that shapes do not depend on values.
            rows = gradient * is_own.unsqueeze(-1)
            into.index_add_(0, local.flatten(), rows.flatten(0, -2))
        return None, None if writes else into, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, context: TensorContext) -> Tensor:
        rows = logits.flatten(0, -2)
        if rows.dtype in (torch.bfloat16, torch.float16):
            rows = rows.float()
        flat = targets.flatten()
        is_valid = flat != IGNORE_INDEX
        local = flat - first
        is_own = (local >= 0) & (local < rows.shape[1]) & is_valid
        local = local.masked_fill(~is_own, 0)
        facts = rows.new_zeros(3, len(rows))  # largest, sum of exponentials relative to it, the target's logit
        if rows.shape[1]:
            torch.amax(rows, 1, out=facts[0])
            torch.sum(torch.exp(rows - facts[0].unsqueeze(1)), 1, out=facts[1])
            facts[2] = rows.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~is_own, 0.0)
        else:
            facts[0] = -torch.inf
        everyones = context.exchange.start_gather(facts, 0, [3] * context.exchange.num_ranks)().view(-1, 3, len(rows))
        largest = everyones[:, 0].amax(0)
        exponentials = (everyones[:, 1] * torch.exp(everyones[:, 0] - largest)).sum(0)
        log_sums = largest + torch.log(exponentials)
        ctx.save_for_backward(logits, log_sums, local, is_own, is_valid)
        return (log_sums - everyones[:, 2].sum(0)).masked_fill(~is_valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_sums, local, is_own, is_valid = ctx.saved_tensors
        rows = logits.flatten(0, -2).to(log_sums.dtype)
        probabilities = torch.exp_(rows - log_sums.unsqueeze(1))
        if rows.shape[1]:
            probabilities.scatter_add_(1, local.unsqueeze(1), -is_own.unsqueeze(1).to(rows.dtype))
        probabilities.mul_(gradient).mul_(is_valid.unsqueeze(1))
        return probabilities.to(logits.dtype).view(logits.shape), None, None, None
