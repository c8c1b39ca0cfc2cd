"""DeepSpeed's configuration of a training recipe: every default that would train something else is spelled out."""

from __future__ import annotations

from typing import Any

import torch

from harness.workload import Workload


def engine_config(workload: Workload, zero_optimization: dict[str, Any]) -> dict[str, Any]:
    """Clipping (by itself at 1.0), precision, and micro-batches as gradient accumulation steps. The size of a
    micro-batch is for its logs alone. Where gradients are wider than weights, they travel so, too."""
    training, precision = workload.training, workload.precision
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": training.num_micro_batches,
        "gradient_clipping": training.clip_norm or 0.0,
        "zero_optimization": zero_optimization,
        "zero_allow_untested_optimizer": True,  # torch's own optimizers are on no list of its
        "zero_force_ds_cpu_optimizer": False,
    }
    if precision.compute is torch.bfloat16:
        config["bf16"] = {"enabled": True, "check_grad_overflow": training.skip_nonfinite}
        gradients = "fp32" if precision.gradient is torch.float32 else "bf16"
        config["data_types"] = {"grad_accum_dtype": gradients}
        config["communication_data_type"] = gradients
    return config
