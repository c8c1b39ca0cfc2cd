"""What DeepSpeed's engine cannot train, whatever its strategy."""

from __future__ import annotations

import torch

from harness.parameters import logical_parameters
from harness.workload import Workload


def why_not(workload: Workload, device: torch.device, *, zero: bool) -> str | None:
    """What stands in the way, with ZeRO's optimizers or without them, or None."""
    precision = workload.precision
    if precision.compute is torch.float64:
        return "DeepSpeed reduces no fp64 gradients, and its ZeRO steps fp32 copies of the weights"
    if not zero and precision.master is not None and precision.gradient is not precision.compute:
        return f"without ZeRO DeepSpeed has no gradients wider than weights, got {precision.name}"
    if workload.leaves_parameters_unused:
        return "DeepSpeed steps parameters that nobody used as well, by decay and by their moments"
    if workload.synchronise_batch_norm and device.type == "cpu":
        return "torch.nn.SyncBatchNorm runs on accelerators only"
    parameters = logical_parameters(workload.model_without_memory(), workload.decays)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters if p.trainable})
    if not dtypes:
        return "DeepSpeed needs a parameter to train, got none"
    if workload.fixed_dtypes and dtypes != ["float32"]:
        return f"DeepSpeed trains parameters of one dtype, got {', '.join(dtypes)}"
    for parameter in parameters:
        if not parameter.shape:
            return f"DeepSpeed cannot broadcast a parameter without dims, as {parameter.name} is"
    return None
