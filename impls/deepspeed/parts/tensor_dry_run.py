"""A step of the first rank of AutoTP on tensors without memory: its layers' own operations on its slices, without the
sums. See harness.implementation.DryStep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from harness.implementation import DryStep, phase
from harness.workload import Batch, Workload
from impls.deepspeed.parts.tensor_slices import slices_of


def dry_step(workload: Workload, num_ranks: int, module: nn.Module, *, held_bytes: int, cuts_head: bool) -> DryStep:
    """That of the rank which holds `held_bytes` of parameters and optimizer states, most of all. Its gradients are
    copied into one flat tensor, though there is nobody to sum with, and once more where masters are stepped."""
    _cut(module, workload, num_ranks, cuts_head=cuts_head)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    device = next(module.parameters()).device

    def take(batch: Batch) -> None:
        for micro_batch in batch.micro_batches:
            with phase("forward"):
                objective = workload.loss_sum(module, micro_batch) / batch.global_num_tokens
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


def _cut(module: nn.Module, workload: Workload, num_ranks: int, *, cuts_head: bool) -> None:
    """Puts layers like DeepSpeed's in the place of those that it replaces."""
    cut = slices_of(module, workload, cuts_head=cuts_head)
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
        module.set_submodule(
            name, _Layer(**parameters, sums_gradient=spec["partition_type"] == "column", gathered=gathered)
        )


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
