"""Sums of many gradients over a group of ranks, one collective for each dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def sum_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Leaves each parameter's gradient a view of the flat sum of all, so that nothing is copied back. Parameters
    without one are left out: on every rank of `group` the same."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    for dtype in dict.fromkeys(parameter.dtype for parameter in with_gradient):
        alike = [parameter for parameter in with_gradient if parameter.dtype == dtype]
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in alike if parameter.grad is not None])
        dist.all_reduce(flat, group=group)
        for parameter, piece in zip(alike, flat.split([parameter.numel() for parameter in alike]), strict=True):
            parameter.grad = piece.view(parameter.shape)
