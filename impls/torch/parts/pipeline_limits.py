"""What torch.distributed.pipelining cannot train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import chain
from harness.workload import Workload
from impls.torch.parts import pipeline_schedules
from impls.torch.parts.pipeline_plan import PipelinePlan, plan


def why_not(workload: Workload, num_ranks: int, options: Mapping[str, Any]) -> str | None:
    """What stands in the way of `num_ranks` under the options of torch.pipeline, or None."""
    precision, num_micro_batches = workload.precision, workload.training.num_micro_batches
    if precision.gradient != precision.compute:
        return (
            f"torch.distributed.pipelining sums gradients in the parameters' dtype, "
            f"got {precision.name} with gradients in {precision.gradient}"
        )
    schedule, chunks = options.get("schedule", "1f1b"), options.get("chunks", 1)
    return (
        pipeline_schedules.why_not(schedule, num_ranks, num_micro_batches, chunks)
        or chain.why_not(workload, num_ranks * chunks)
        or _changing_shapes(workload)
        or (_lost_gradients(plan(workload, num_ranks, options)) if schedule == "zero_bubble" else None)
    )


def _changing_shapes(workload: Workload) -> str | None:
    """Stages receive into memory that was made once."""
    shapes = dict.fromkeys(tuple(micro_batch.inputs.shape) for micro_batch in workload.batch(0).micro_batches)
    if len(shapes) > 1:
        return f"torch's stages take micro-batches of one shape, got {' and '.join(map(str, shapes))}"
    return None


def _lost_gradients(planned: PipelinePlan) -> str | None:
    """Torch finds the weights of a later stage on the way to what it has received."""
    for stage, border in enumerate(planned.inputs):
        if stage and not any(shape.carries_gradient for shape in border):
            return f"torch's zero-bubble finds no weights in stage {stage}, which receives nothing with a gradient"
    return None
