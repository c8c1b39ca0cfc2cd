"""A step of the first rank of FairScale's model-parallel layers on tensors without memory: their own operations on its
slices, without the sums. See harness.implementation.DryStep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from harness.implementation import DryStep, phase
from harness.parameters import logical_parameters
from harness.tensor_plan import ColumnParallel, RowParallel
from harness.workload import Batch, Workload
from impls.fairscale.parts.parallel_layers import cuts_logits, plan_of, slices_of


def dry_step(workload: Workload, num_ranks: int, module: nn.Module, *, held_bytes: int) -> DryStep:
    """That of a rank which holds `held_bytes` of parameters and optimizer states. Gradients are autograd's own; where
    masters are stepped they have wider copies, all at once."""
    _cut(module, workload, num_ranks)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    device = next(module.parameters()).device
    cutting = replace(workload, loss=_cross_entropy_of_parts) if cuts_logits(workload) else workload

    def take(batch: Batch) -> None:
        for micro_batch in batch.micro_batches:
            with phase("forward"):
                loss = cutting.loss_sum(module, micro_batch)
            (loss / batch.global_num_tokens).backward()
        if workload.precision.master is not None:
            torch.empty(sum(p.numel() for p in trained), dtype=workload.precision.master, device=device)
        for parameter in trained:
            parameter.grad = None

    held = [*module.parameters(), *module.buffers()]
    return DryStep(held_bytes=held_bytes, held=held, batch=workload.batch(0), take=take)


def _cut(module: nn.Module, workload: Workload, num_ranks: int) -> None:
    """Puts layers like FairScale's in the place of those that the tensor plan names."""
    plan = plan_of(workload, module)
    slices, aliases = slices_of(plan, module), {p.name: p.aliases for p in logical_parameters(module)}
    for name, role in plan.roles.items():
        whole = module.get_submodule(name)
        parameters: dict[str, nn.Parameter | None] = {}
        for kind in ("weight", "bias"):
            parameter = getattr(whole, kind, None)
            if parameter is not None and f"{name}.{kind}" in slices:
                dim = slices[f"{name}.{kind}"].dim
                own = parameter.detach().narrow(dim, 0, parameter.shape[dim] // num_ranks).clone()
                parameter = nn.Parameter(own, requires_grad=parameter.requires_grad)
            parameters[kind] = parameter
        layer: nn.Module
        if isinstance(whole, nn.Embedding):
            layer = _Embedding(parameters["weight"], whole.padding_idx)
        else:
            gathered = 0 if cuts_logits(workload) or isinstance(role, ColumnParallel | RowParallel) else num_ranks
            layer = _Layer(**parameters, sums_gradient=not isinstance(role, RowParallel), gathered=gathered)
        module.set_submodule(name, layer)
    for first, others in aliases.items():
        for alias in others:
            path, _, kind = alias.rpartition(".")
            setattr(module.get_submodule(path), kind, module.get_parameter(first))


class _Embedding(nn.Module):
    """Of its own rows; what others have comes by the sum of the outputs."""

    def __init__(self, weight: nn.Parameter | None, padding_idx: int | None) -> None:
        super().__init__()
        self.weight, self._padding_idx = weight, padding_idx

    def forward(self, indices: Tensor) -> Tensor:
        assert self.weight is not None
        elsewhere = (indices < 0) | (indices >= len(self.weight))
        own = indices.clone() - 0
        own[elsewhere] = 0
        output = functional.embedding(own, self.weight, self._padding_idx)
        output[elsewhere, :] = 0.0
        return _SummedInPlace.apply(output)  # type: ignore[no-any-return, no-untyped-call]


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
        assert self.weight is not None
        if not self._sums_gradient:
            summed: Tensor = _SummedInPlace.apply(functional.linear(given, self.weight))  # type: ignore[no-untyped-call]
            return summed if self.bias is None else summed + self.bias
        output = functional.linear(_GradientSummed.apply(given), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return _Gathered.apply(output, self._gathered) if self._gathered else output  # type: ignore[no-untyped-call]


class _GradientSummed(Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _SummedInPlace(Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        ctx.mark_dirty(given)
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, num_ranks: int) -> Tensor:
        ctx.own_features = own.shape[-1]
        received = [own, *(torch.empty_like(own) for _ in range(num_ranks - 1))]
        return torch.cat(received, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(-1, 0, ctx.own_features).contiguous(), None


class _CrossEntropyOfParts(Function):
    """FairScale's, step by step: the parts of the logits are overwritten by what backward needs."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        largest = torch.max(logits, dim=-1)[0]
        logits.sub_(largest.unsqueeze(dim=-1))
        elsewhere = (targets < 0) | (targets >= logits.shape[-1])
        own = targets.clone() - 0
        own[elsewhere] = 0
        rows = torch.arange(len(logits), device=logits.device)
        predicted = logits[rows, own].clone()
        predicted[elsewhere] = 0.0
        exponentials = logits.exp()
        sums = exponentials.sum(dim=-1)
        losses = torch.log(sums) - predicted
        exponentials.div_(sums.unsqueeze(dim=-1))
        ctx.save_for_backward(exponentials, elsewhere, own)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        softmax, elsewhere, own = ctx.saved_tensors
        rows = torch.arange(len(softmax), device=softmax.device)
        softmax[rows, own] -= 1.0 - elsewhere.to(softmax.dtype)
        softmax.mul_(gradients[0].unsqueeze(dim=-1))
        return softmax, None


def _cross_entropy_of_parts(outputs: Tensor, targets: Tensor) -> Tensor:
    """As impls/fairscale/tensor.py has it."""
    logits = outputs.flatten(0, -2)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = _CrossEntropyOfParts.apply(logits, targets.flatten())  # type: ignore[no-untyped-call]
    return torch.where(targets.flatten() >= 0, losses, 0.0).sum()
