"""What AutoTP costs a rank: bytes of memory by category and bytes sent in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.layout import Layout
from harness.parameters import LogicalParameter, MemoryCategory, all_reduce_wire_bytes, replicated_state_bytes
from harness.workload import Workload, in_compute_precision
from impls.deepspeed.parts.tensor_slices import Head, TensorSlices, slices_of


def memory_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, *, head: Head
) -> dict[MemoryCategory, int]:
    """Of the first rank, which holds most, with the flat copy of its gradients in which they would be summed over a
    data axis."""
    cut = slices_of(workload.model_without_memory(), workload, head=head)
    held: dict[MemoryCategory, int] = {"parameters": 0, "gradients": 0, "optimizer_states": 0}
    for parameter in parameters:
        whole = replicated_state_bytes([parameter], workload.precision, workload.training.num_moments)
        for category in held:
            held[category] += whole[category] * _share(parameter, cut, layout.tensor) // max(parameter.num_elements, 1)
    return {**held, "communication_buffers": held["gradients"]}


def wire_bytes(workload: Workload, layout: Layout, *, head: Head) -> int:
    """Each micro-batch: a column-parallel layer's sum of its input's gradient, a row-parallel one's of its output, as a
    cut embedding's; the gathered logits, or of cut ones three sums of a number a target (largest, exponentials, own
    logit); sums of the gradients of what ranks use on slices. Then the norms: ours, and the engine's by which it
    clips."""
    ranks, training = layout.tensor, workload.training
    sent = sum(_micro_batch_bytes(workload, batch.inputs, ranks, head) for batch in workload.batch(0).micro_batches)
    if training.skip_nonfinite:
        sent += (ranks - 1) * torch.float64.itemsize
    if training.clip_norm is not None:
        sent += all_reduce_wire_bytes(torch.float32.itemsize, ranks)
    return sent


def _micro_batch_bytes(workload: Workload, inputs: Tensor, ranks: int, head: Head) -> int:
    model = in_compute_precision(workload, workload.model_without_memory())
    cut = slices_of(model, workload, head=head)
    cut_head = None if cut.cut_head is None else model.get_submodule(cut.cut_head)
    sent = 0

    def count(layer: nn.Module, args: Any, output: Tensor, spec: dict[str, Any]) -> None:
        nonlocal sent
        (given,) = args
        if spec["partition_type"] == "row":
            sent += all_reduce_wire_bytes(output.numel() * output.element_size(), ranks)
            return
        if given.requires_grad:
            sent += all_reduce_wire_bytes(given.numel() * given.element_size(), ranks)
        if spec.get("gather_output"):
            features = output.shape[-1]
            padded = -(-features // ranks)  # the widest piece
            sent += (ranks - 1) * padded * (output.numel() // features) * output.element_size()
        if layer is cut_head:
            sent += 3 * all_reduce_wire_bytes(output.numel() // output.shape[-1] * torch.float32.itemsize, ranks)

    embeddings = {name: {"partition_type": "row"} for name in cut.cut_embeddings}
    for name, spec in {**cut.layers, **embeddings}.items():
        model.get_submodule(name).register_forward_hook(
            lambda layer, args, output, spec=spec: count(layer, args, output, spec)
        )
    with torch.device("meta"):
        model(inputs.to("meta"))
    for name in cut.summed:
        parameter = model.get_parameter(name)
        sent += all_reduce_wire_bytes(parameter.numel() * parameter.element_size(), ranks)
    return sent


def _share(parameter: LogicalParameter, cut: TensorSlices, ranks: int) -> int:
    """How many of its elements the first rank holds."""
    if parameter.name not in cut.slices:
        return parameter.num_elements
    size = parameter.shape[cut.slices[parameter.name].dim]
    return parameter.num_elements // size * -(-size // ranks)
