"""Time: from the ranks' raw step times to the figures of a case.

The slowest rank is the step; the median over steps is the case. Tokens per second count each token of the global batch
once. Model FLOPs utilisation is (model FLOPs of those tokens) / (seconds x devices x dense peak of the dtype), and
recomputation adds nothing to it (Chowdhery et al. 2022, appendix B); only on devices whose peak is known.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import torch

_A100 = {torch.bfloat16: 312e12, torch.float32: 19.5e12, torch.float64: 19.5e12}
_HOPPER_SXM = {torch.bfloat16: 989e12, torch.float32: 67e12, torch.float64: 67e12}
_DENSE_PEAK_FLOPS: dict[str, dict[torch.dtype, float]] = {
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA H200": _HOPPER_SXM,
}
"""FLOP/s by the device's full name (cards of one generation differ), from the vendor's data sheets: bf16 and fp64 on
tensor cores, without sparsity; fp32 outside them, for TF32 is another format."""


class NothingMeasured(Exception):
    """There is no timed step to derive a figure from."""


def slowest_rank(step_seconds: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each step, from those of each rank (ranks, steps). NothingMeasured where there are none."""
    if not step_seconds or not all(step_seconds):
        raise NothingMeasured("no timed step: expected at least one on every rank")
    return [max(of_ranks) for of_ranks in zip(*step_seconds, strict=True)]


def time_metrics(
    step_seconds: Sequence[Sequence[float]],
    cpu_seconds: Sequence[float],
    global_num_tokens: Sequence[int],
    unit: Literal["tokens", "samples"],
) -> dict[str, float]:
    """`step.*`, `throughput.*` and `cpu.*` from raw samples: seconds (ranks, steps), processor seconds of each rank
    over all of them, and the tokens of each step's global batch."""
    seconds = slowest_rank(step_seconds)
    median = statistics.median(seconds)
    return {
        "step.median_seconds": median,
        "step.min_seconds": min(seconds),
        "step.max_seconds": max(seconds),
        "step.num_samples": float(len(seconds)),
        "cpu.seconds_per_step": sum(cpu_seconds) / len(seconds),
        f"throughput.{unit}_per_second": statistics.fmean(global_num_tokens) / median,
    }


def model_flops_utilisation(
    units_per_second: float, flops_per_unit: float, num_devices: int, device_name: str, dtype: torch.dtype
) -> float | None:
    """The fraction of the devices' dense peak that went into the model's own FLOPs, None where the peak is unknown."""
    peak = _DENSE_PEAK_FLOPS.get(device_name, {}).get(dtype)
    return None if peak is None else units_per_second * flops_per_unit / (num_devices * peak)
