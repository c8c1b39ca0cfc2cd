"""A step of the first rank of AutoTP on tensors without memory: its layers' own operations on its slices, without the
sums. See harness.implementation.DryStep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from harness.data import IGNORE_INDEX
from harness.implementation import DryStep, phase
from harness.workload import Batch, Workload
from impls.deepspeed.parts.tensor_slices import Head, TensorSlices, slices_of


def dry_step(workload: Workload, num_ranks: int, module: nn.Module, *, held_bytes: int, head: Head) -> DryStep:
    """That of the rank which holds `held_bytes` of parameters and optimizer states, most of all. Its gradients are
    copied into one flat tensor, though there is nobody to sum with, and once more where masters are stepped."""
    cut = slices_of(module, workload, head=head)
    _cut(module, cut, num_ranks)
    cutting = workload if cut.cut_head is None else replace(workload, loss=_cross_entropy_of_parts)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    device = next(module.parameters()).device

    def take(batch: Batch) -> None:
        for micro_batch in batch.micro_batches:
            with phase("forward"):
                objective = cutting.loss_sum(module, micro_batch) / batch.global_num_tokens
            objective.backward()
        for dtype in {parameter.dtype for parameter in trained}:
            elements = sum(parameter.numel() for parameter in trained if parameter.dtype == dtype)
            torch.empty(elements, dtype=dtype, device=device)
        if workload.precision.master is not None:
            torch.empty(sum(p.numel() for p in trained), dtype=workload.precision.master, device=device)
        for parameter in trained:
            parameter.grad = None

    held = [*module.parameters(), *module.buffers()]
    return DryStep(held_bytes=held_bytes, held=held, batch=workload.batch(0), take=take)


def _cut(module: nn.Module, cut: TensorSlices, num_ranks: int) -> None:
    """Puts layers like DeepSpeed's in the place of those that it replaces."""
    for name, spec in cut.layers.items():
        whole = module.get_submodule(name)
        parameters: dict[str, nn.Parameter | None] = {}
        for kind in ("weight", "bias"):
            parameter = getattr(whole, kind)
            if parameter is not None and f"{name}.{kind}" in cut.slices:
                dim = cut.slices[f"{name}.{kind}"].dim
                own = parameter.detach().narrow(dim, 0, -(-parameter.shape[dim] // num_ranks)).clone()
                parameter = nn.Parameter(own, requires_grad=parameter.requires_grad)
            parameters[kind] = parameter
        gathered = num_ranks if spec.get("gather_output") else 0
        layer = _Layer(**parameters, sums_gradient=spec["partition_type"] == "column", gathered=gathered)
        module.set_submodule(name, layer)
        if name == cut.cut_head:
            for embedding in cut.cut_embeddings:
                padding_idx: Any = module.get_submodule(embedding).padding_idx
                module.set_submodule(embedding, _Embedding(layer.weight, padding_idx))


class _Layer(nn.Module):
    """Column-parallel where it `sums_gradient`, that of its input; its output is then `gathered` from so many ranks,
    or not at all. Row-parallel elsewhere: what it sums is its output, before the bias."""

    def __init__(
        self, weight: nn.Parameter | None, bias: nn.Parameter | None, *, sums_gradient: bool, gathered: int
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._sums_gradient, self._gathered = sums_gradient, gathered

    def forward(self, given: Tensor) -> Tensor:
        if self._sums_gradient:
            given = _Summed.apply(given)  # type: ignore[no-untyped-call]
        assert self.weight is not None
        output = torch.matmul(given, self.weight.transpose(-1, -2))
        if not self._sums_gradient:
            output = _Summed.apply(output)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias
        return _Gathered.apply(output, self._gathered) if self._gathered else output  # type: ignore[no-untyped-call]


class _Embedding(nn.Module):
    """Of its own rows; what others have comes by the sum of the outputs."""

    def __init__(self, weight: nn.Parameter | None, padding_idx: int | None) -> None:
        super().__init__()
        self.weight, self._padding_idx = weight, padding_idx

    def forward(self, indices: Tensor) -> Tensor:
        assert self.weight is not None
        elsewhere = (indices < 0) | (indices >= len(self.weight))
        own = (indices - 0).masked_fill(elsewhere, 0)
        output = functional.embedding(own, self.weight, padding_idx=self._padding_idx)
        output = output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return _Summed.apply(output)  # type: ignore[no-any-return, no-untyped-call]


class _Summed(Function):
    """A sum forward or backward, in place."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Gathered(Function):
    """The outputs of all ranks, received end to end and laid side by side."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, num_ranks: int) -> Tensor:
        ctx.own_features = own.shape[-1]
        received = own.new_empty((num_ranks * own.shape[0], *own.shape[1:])).view(num_ranks, *own.shape)
        return torch.cat([received[rank] for rank in range(num_ranks)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(-1, 0, ctx.own_features).contiguous(), None


class _CrossEntropyOfParts(Function):
    """DeepSpeed's, step by step."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, targets: Tensor) -> Tensor:
        logits = parts.float()
        largest = logits.amax(dim=-1).clone()
        exponentials = torch.exp(logits - largest.unsqueeze(-1))
        sums = exponentials.sum(dim=-1)
        valid = targets != IGNORE_INDEX
        within = valid & (targets >= 0) & (targets < logits.shape[-1])
        own = (targets - 0).clamp(min=0, max=logits.shape[-1] - 1)
        predicted = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1)
        predicted = torch.where(within, predicted, torch.zeros_like(predicted))
        losses = torch.log(sums) + largest - predicted
        losses = torch.where(valid, losses, torch.zeros_like(losses))
        ctx.save_for_backward(exponentials, sums, own, within, valid)
        ctx.dtype = parts.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exponentials, sums, own, within, valid = ctx.saved_tensors
        gradient = exponentials / sums.unsqueeze(-1)
        gradient.scatter_add_(-1, own.unsqueeze(-1), -within.unsqueeze(-1).to(gradient.dtype))
        gradient *= valid.unsqueeze(-1).to(gradient.dtype)
        gradient *= gradients[0].unsqueeze(-1)
        return gradient.to(ctx.dtype), None


def _cross_entropy_of_parts(outputs: Tensor, targets: Tensor) -> Tensor:
    """As impls/deepspeed/tensor.py has it."""
    losses: Tensor = _CrossEntropyOfParts.apply(outputs.flatten(0, -2), targets.flatten())  # type: ignore[no-untyped-call]
    return losses.sum() / 1.0
