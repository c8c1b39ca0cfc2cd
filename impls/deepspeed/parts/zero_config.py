"""ZeRO's part of DeepSpeed's configuration, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from harness.layout import Layout
from harness.parameters import LogicalParameter
from harness.token_counts import mean_of_means
from harness.workload import Workload
from impls.deepspeed.parts import limits

MOST_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's own bucket. It is allocated whole, so that a smaller model is better served by one of its own size."""
DEFAULT_CLIP_NORM = 1.0
STAGES = (0, 1, 2, 3)
_OF_STAGE_3 = (
    "stage3_param_persistence_threshold",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "zero_hpz_partition_size",
    "memory_efficient_linear",
)
_OF_STAGES_1_AND_2 = ("use_multi_rank_bucket_allreduce",)
_OF_ZERO = ("reduce_bucket_size", "overlap_comm", "reduce_scatter", "contiguous_gradients")


def zero_config(
    parameters: Sequence[LogicalParameter], workload: Workload, options: Mapping[str, Any]
) -> dict[str, Any]:
    """`zero_optimization`: options have DeepSpeed's own names, None leaves the choice to it. In stages 1 and 2 the norm
    is computed where the recipe needs it, never else."""
    stage = options.get("stage", 1)
    config: dict[str, Any] = {
        name: value
        for name, value in options.items()
        if value is not None and name not in ("loss_scaling", "clipping", "cpu_adam", "offload_optimizer")
    }
    config |= {"stage": stage, "reduce_bucket_size": bucket_elements(parameters, options)}
    if options.get("offload_optimizer"):
        config["offload_optimizer"] = {"device": "cpu"}
    if may_leave_out_norm(workload, options) and not workload.training.checks_norm:
        config["compute_grad_norm"] = False
    return config


def clipped(workload: Workload, options: Mapping[str, Any]) -> Workload:
    """The workload by whose recipe the engine clips: where it is told nothing, by its own default."""
    if options.get("clipping", "recipe") == "recipe" or workload.training.clip_norm is not None:
        return workload
    return replace(workload, training=replace(workload.training, clip_norm=DEFAULT_CLIP_NORM))


def other_work(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> str | None:
    """What departs from the recipe, in words, or None."""
    found = []
    if clipped(workload, options) is not workload:
        found.append(f"gradients are clipped at {DEFAULT_CLIP_NORM:g}, DeepSpeed's default; the recipe clips none")
    if options.get("loss_scaling") == "rank_mean" and (reason := mean_of_means(workload, layout.data)):
        found.append(reason)
    return "; ".join(found) or None


def beyond_the_textbook(device: torch.device, options: Mapping[str, Any]) -> str | None:
    """Why a rank sends more than the textbook of its stage on such devices, or None."""
    stage, over_gloo = options.get("stage", 1), device.type == "cpu"
    if stage == 3:
        return "over gloo a reduce-scatter is an all-reduce of twice the bytes" if over_gloo else None
    if not stage:
        return None
    if reduces_to_owners(options):
        return "in gloo's reductions to an owner ranks pass on what others sent" if over_gloo else None
    return "gradients are all-reduced, twice the bytes of a reduce-scatter, and parameters are gathered besides"


def reduces_to_owners(options: Mapping[str, Any]) -> bool:
    """Whether stages 1 and 2 bring each owner the sums of its part alone."""
    at_once = options.get("use_multi_rank_bucket_allreduce", True)
    return not at_once and bool(options.get("reduce_scatter", True) and options.get("contiguous_gradients", True))


def bucket_elements(parameters: Sequence[LogicalParameter], options: Mapping[str, Any]) -> int:
    """The most gradient elements that are reduced at once."""
    trained = sum(parameter.num_elements for parameter in parameters if parameter.trainable)
    given: int | None = options.get("reduce_bucket_size")
    return min(trained, MOST_BUCKET_ELEMENTS) if given is None else given


def keeps_gathered(options: Mapping[str, Any]) -> bool:
    """Whether stage 3 keeps what it has gathered from forward until backward: what is used again within its distance,
    and what it has gathered ahead."""
    return any(options.get(name) != 0 for name in ("stage3_max_reuse_distance", "stage3_prefetch_bucket_size"))


def keeps_whole_fp32_gradients(workload: Workload, options: Mapping[str, Any]) -> bool:
    """Whether it is DeepSpeed's bf16 optimizer that steps: stage 1 where gradients are wider than weights."""
    precision = workload.precision
    widens = precision.master is not None and precision.gradient is not precision.compute
    return options.get("stage", 1) == 1 and widens and not options.get("offload_optimizer")


def lends_in_backward(workload: Workload, options: Mapping[str, Any]) -> bool:
    """Whether it is known what a rank holds of gradients from moment to moment (zero_dry_run.py)."""
    return (
        options.get("stage", 1) < 3
        and not options.get("offload_optimizer")
        and not keeps_whole_fp32_gradients(workload, options)
    )


def may_leave_out_norm(workload: Workload, options: Mapping[str, Any]) -> bool:
    return (
        options.get("stage", 1) in (1, 2)
        and not options.get("offload_optimizer")
        and not keeps_whole_fp32_gradients(workload, options)
    )


def refused(options: Mapping[str, Any]) -> str | None:
    """What is wrong with the values, or None."""
    stage = options.get("stage", 1)
    if stage not in STAGES:
        return f"stage must be one of {', '.join(map(str, STAGES))}, got {stage!r}"
    size = options.get("reduce_bucket_size")
    if size is not None and size < 1:
        return f"reduce_bucket_size must be at least 1, got {size}"
    for name in _OF_STAGE_3:
        if name in options and stage != 3:
            return f"{name} is an option of stage 3, got stage {stage}"
        least = int(name == "zero_hpz_partition_size")
        if options.get(name) is not None and options[name] < least:
            return f"{name} must be at least {least}, got {options[name]}"
    for name in _OF_STAGES_1_AND_2:
        if name in options and stage not in (1, 2):
            return f"{name} is an option of stages 1 and 2, got stage {stage}"
    for name in _OF_ZERO:
        if name in options and not stage:
            return f"{name} is an option of stages 1 to 3, got stage 0"
    if options.get("offload_optimizer") and not stage:
        return "offload_optimizer needs a stage of at least 1, got 0"
    if options.get("clipping", "recipe") not in ("recipe", "default"):
        return f"clipping must be recipe or default, got {options['clipping']!r}"
    if options.get("loss_scaling", "global_tokens") not in ("global_tokens", "rank_mean"):
        return f"loss_scaling must be global_tokens or rank_mean, got {options['loss_scaling']!r}"
    return None


def why_not(workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]) -> str | None:
    """What stands in the way of the engine on this layout under these options, or None."""
    stage = options.get("stage", 1)
    if (layout.tensor, layout.pipeline) != (1, 1) or layout.shard not in (None, layout.data if stage else 1):
        among = "over all of it" if stage else "nothing"
        return f"DeepSpeed's stage {stage} takes a data degree and shards {among}, got {layout}"
    hpz = options.get("zero_hpz_partition_size", 1)
    if layout.data % hpz:
        return f"zero_hpz_partition_size must divide the data degree, got {hpz} and {layout.data}"
    return (
        limits.why_not(workload, device, zero=stage > 0)
        or _of_recipe(workload, device, options)
        or workload.fits_data_degree(layout.data)
    )


def _of_recipe(workload: Workload, device: torch.device, options: Mapping[str, Any]) -> str | None:
    training = workload.training
    if training.skip_nonfinite and keeps_whole_fp32_gradients(workload, options):
        return "DeepSpeed's bf16 optimizer, its stage 1 with fp32 gradients, never skips a step"
    if options.get("cpu_adam"):
        if training.optimizer != "adamw":
            return f"DeepSpeedCPUAdam is AdamW, got {training.optimizer}"
        if device.type != "cpu" and not options.get("offload_optimizer"):
            return "DeepSpeedCPUAdam steps what lies on the CPU: it needs offload_optimizer=true"
    return None
