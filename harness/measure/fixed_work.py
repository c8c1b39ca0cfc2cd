"""Fixed work, done by a rank alone: how fast it is when it waits for nobody. See harness.measure.straggler."""

from __future__ import annotations

import time

import torch

# A matrix' width and how many products: some tens of milliseconds.
_SIZES = {"cpu": (512, 8), "cuda": (2048, 64)}


def fixed_work_seconds(device: torch.device) -> float:
    """On the host's clock, which goes on while this rank is not let work."""
    width, num_products = _SIZES[device.type]
    factor = torch.full((width, width), 1 / width, device=device)
    product = torch.mm(factor, factor)
    _synchronise(device)
    began = time.monotonic()
    for _ in range(num_products):
        torch.mm(factor, factor, out=product)
    _synchronise(device)
    return time.monotonic() - began


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
