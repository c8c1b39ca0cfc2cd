"""Precision: which dtype the weights, the gradients and the optimizer's masters have."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which dtype each thing has. `master` is the dtype of the optimizer's own copy of the weights, None where it steps
    the parameters themselves; gradients are accumulated over micro-batches and reduced between ranks in `gradient`."""

    name: str
    compute: torch.dtype
    gradient: torch.dtype
    master: torch.dtype | None = None


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(name="fp64", compute=torch.float64, gradient=torch.float64),
        Precision(name="fp32", compute=torch.float32, gradient=torch.float32),
        Precision(name="bf16", compute=torch.bfloat16, gradient=torch.bfloat16, master=torch.float32),
        Precision(name="bf16_fp32_gradients", compute=torch.bfloat16, gradient=torch.float32, master=torch.float32),
    )
}
