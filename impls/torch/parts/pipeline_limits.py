"""What torch.distributed.pipelining cannot train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness import chain
from harness.chain import chain_of
from harness.layout import Layout
from harness.tensors_in_use import storage_key
from harness.workload import Workload
from impls.torch.parts import pipeline_schedules
from impls.torch.parts.pipeline_plan import PipelinePlan, plan
from impls.torch.parts.pipeline_stage import StageModule, examples


def why_not(workload: Workload, layout: Layout, options: Mapping[str, Any]) -> str | None:
    """What stands in the way of the pipeline of `layout` under the options of torch.pipeline, or None."""
    precision, num_micro_batches = workload.precision, workload.training.num_micro_batches
    if precision.gradient != precision.compute:
        return (
            f"torch.distributed.pipelining sums gradients in the parameters' dtype, "
            f"got {precision.name} with gradients in {precision.gradient}"
        )
    schedule, chunks = options.get("schedule", "1f1b"), options.get("chunks", 1)
    return (
        pipeline_schedules.why_not(schedule, layout.pipeline, num_micro_batches, chunks)
        or chain.why_not(workload, layout.pipeline * chunks)
        or _changing_shapes(workload, layout.data)
        or (_split_backward(plan(workload, layout, options), workload) if schedule == "zero_bubble" else None)
    )


def _changing_shapes(workload: Workload, data_degree: int) -> str | None:
    """Stages receive into memory that was made once."""
    shares = [workload.batch(0, data_rank=rank, data_degree=data_degree) for rank in range(data_degree)]
    shapes = dict.fromkeys(tuple(micro_batch.inputs.shape) for share in shares for micro_batch in share.micro_batches)
    if len(shapes) > 1:
        return f"torch's stages take micro-batches of one shape, got {' and '.join(map(str, shapes))}"
    return None


def _split_backward(planned: PipelinePlan, workload: Workload) -> str | None:
    """Of a later stage torch finds the weights on the way to what the stage has received; sends the inputs' gradients
    as they come; and adds up the weights' in the first one's memory, whoever else has a hand in that. The first stage
    goes backward whole. Stages without values tell."""
    blocks = chain_of(workload).blocks
    for stage in range(1, planned.num_stages):
        module = StageModule([blocks[index] for index in planned.stages[stage]])
        inputs = examples(planned.inputs[stage])
        received = [tensor for tensor in inputs if tensor.requires_grad]
        if not received:
            return f"torch's zero-bubble finds no weights in stage {stage}, which receives nothing with a gradient"
        with torch.device("meta"):
            outputs = [tensor for tensor in module.tensors(inputs) if tensor.requires_grad]
        weights = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        given = [torch.empty_like(tensor) for tensor in outputs]
        found = torch.autograd.grad(outputs, [*received, *weights.values()], given, allow_unused=True)
        if not all(gradient is None or gradient.is_contiguous() for gradient in found[: len(received)]):
            return f"torch's zero-bubble sends gradients as they come, and that of stage {stage} is not contiguous"
        taken = {storage_key(tensor) for tensor in (*given, *found[: len(received)]) if tensor is not None}
        for name, gradient in zip(weights, found[len(received) :], strict=True):
            if gradient is not None and storage_key(gradient) in taken:
                return f"torch's zero-bubble adds to memory that the gradient of {name} shares with another"
            if gradient is not None:
                taken.add(storage_key(gradient))
    return None
