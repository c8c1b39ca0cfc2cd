"""BatchNorm whose statistics are those of the whole micro-batch, over all data ranks, weighted by their sample counts.

torch's own SyncBatchNorm wants an accelerator; this one runs wherever sums can be reduced, in any dtype. Ranks may hold
unlike numbers of samples. Ioffe and Szegedy 2015, "Batch Normalization".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.implementation import Preparation
from harness.workload import Workload, in_compute_precision
from impls.native.parts.order_of_use import first_inputs, forward_without_values

Before = Callable[[], None]
"""What to do before a layer waits for its peers in backward."""


def _nothing() -> None:
    pass


def synchronise_batch_norm(
    model: nn.Module, group: dist.ProcessGroup | None, on_call: Callable[[], Before] = lambda: _nothing
) -> None:
    """Makes every BatchNorm of `model` use the statistics of all ranks of `group` while training; parameter and buffer
    names stay. Without a group there are no peers. `on_call` is asked in each forward."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = functools.partial(_forward, module, group, on_call)  # type: ignore[method-assign]


def prepared_alone(prepare: Preparation) -> Preparation:
    """A dry run as `prepare` has it, whose BatchNorm computes and keeps what it would beside peers."""

    def prepare_both(model: nn.Module, gradients: Mapping[str, Tensor]) -> Callable[[Tensor], None]:
        synchronise_batch_norm(model, None)
        return prepare(model, gradients)

    return prepare_both


def summed_bytes(workload: Workload, data_degree: int) -> int:
    """The bytes that the forward and the backward of a micro-batch sum over the ranks: for each call of a BatchNorm in
    training two statistics a channel and one count, and the gradients of all of these. Where the model does not run
    without values each is taken to be called once."""
    compute = workload.precision.compute
    model = in_compute_precision(workload, workload.model_without_memory())
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    channels: list[int] = []
    for norm in norms:
        norm.register_forward_pre_hook(lambda called, _: channels.append(called.num_features))
    try:
        forward_without_values(model, first_inputs(workload, data_degree))
    except Exception:  # whatever a model does with tensors that have no values
        channels = [norm.num_features for norm in norms]
    return sum(2 * (2 * num_channels + 1) for num_channels in channels) * _statistics_dtype(compute).itemsize


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """A sample count above 256 is no bf16 number."""
    return torch.promote_types(dtype, torch.float32)


def _forward(
    module: _BatchNorm, group: dist.ProcessGroup | None, on_call: Callable[[], Before], inputs: Tensor
) -> Tensor:
    """inputs (samples, channels, ...): normalised over all but the channels, while training over all ranks."""
    if not module.training:
        return type(module).forward(module, inputs)
    before = on_call()
    dtype, inputs = inputs.dtype, inputs.to(_statistics_dtype(inputs.dtype))
    dims = [dim for dim in range(inputs.ndim) if dim != 1]
    shape = [1, -1, *[1] * (inputs.ndim - 2)]
    channels = inputs.shape[1]
    local_count = inputs.numel() // channels
    sums = torch.cat([inputs.sum(dims), inputs.new_tensor([local_count])])
    totals: Tensor = _SumOverRanks.apply(sums, group, before)  # type: ignore[no-untyped-call]
    count = totals[-1].detach()
    mean = totals[:-1] / count
    centred = inputs - mean.view(shape)
    # Squares of centred values: the difference of large numbers E[x^2] - E[x]^2 would lose digits.
    own_squares = (centred * centred).sum(dims)
    squares: Tensor = _SumOverRanks.apply(own_squares, group, before)  # type: ignore[no-untyped-call]
    variance = squares / count
    normalised = centred * torch.rsqrt(variance + module.eps).view(shape)
    if module.affine:
        normalised = normalised * module.weight.view(shape) + module.bias.view(shape)
    if module.num_batches_tracked is not None and module.running_mean is not None and module.running_var is not None:
        with torch.no_grad():
            module.num_batches_tracked.add_(1)
            momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
            unbiased = variance.detach() * (count / (count - 1))
            module.running_mean.lerp_(mean.detach().to(module.running_mean.dtype), momentum)
            module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)
    return normalised.to(dtype)


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; the gradient is summed too, since every rank's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup | None, before: Before) -> Tensor:
        ctx.group, ctx.before = group, before
        return _summed(local, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.before()
        return _summed(gradients[0].contiguous(), ctx.group), None, None


def _summed(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = local.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total
