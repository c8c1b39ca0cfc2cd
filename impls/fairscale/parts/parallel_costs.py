"""What FairScale's model-parallel layers cost a rank, from the shapes of one pass without values.

layer                    forward                           backward
column-parallel          -                                 all-reduce of its input's gradient, if it has one
row-parallel             all-reduce of its output          -
embedding                all-reduce of its output          -
head, logits cut         three all-reduces of a number     all-reduce of its input's gradient
                         a target: maximum, own logit, sum
head, logits gathered    all-gather of the logits          all-reduce of its input's gradient
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from harness.parameters import LogicalParameter, MemoryCategory, replicated_state_bytes
from harness.tensor_plan import ColumnParallel, Role, RowParallel, partial_parameters
from harness.wire_bytes import wire_bytes
from harness.workload import MicroBatch, Workload, in_compute_precision
from impls.fairscale.parts.parallel_layers import cuts_logits, plan_of, slices_of

_Collective = tuple[str, int]  # operation, payload bytes


def memory_bytes(
    workload: Workload, parameters: Sequence[LogicalParameter], num_ranks: int
) -> dict[MemoryCategory, int]:
    """Of a rank's slices, and of what is whole on every rank."""
    model = workload.model_without_memory()
    slices = slices_of(plan_of(workload, model), model)
    held = [_slice(p, slices[p.name].dim, num_ranks) if p.name in slices else p for p in parameters]
    return replicated_state_bytes(held, workload.precision, workload.training.num_moments)


def step_wire_bytes(workload: Workload, parameters: Sequence[LogicalParameter], num_ranks: int) -> int | None:
    """What a rank sends in a step; None where backward computes blocks again, as far as torch finds it necessary."""
    if workload.training.activation_checkpointing:
        return None
    model = in_compute_precision(workload, workload.model_without_memory())
    collectives: list[_Collective] = []
    for micro_batch in workload.batch(0).micro_batches:
        collectives += _of_one_pass(workload, model, micro_batch)
    summands = partial_parameters(model, plan_of(workload, model))
    gradient = workload.precision.gradient
    collectives += [
        ("all_reduce", p.num_elements * (p.dtype if workload.fixed_dtypes else gradient).itemsize)
        for p in parameters
        if p.trainable and p.name in summands
    ]
    if workload.training.checks_norm:
        collectives.append(("all_gather", torch.float64.itemsize * num_ranks))
    return sum(wire_bytes(operation, num_bytes, num_ranks, "gloo") for operation, num_bytes in collectives)


def _slice(parameter: LogicalParameter, dim: int, num_ranks: int) -> LogicalParameter:
    shape = list(parameter.shape)
    shape[dim] //= num_ranks
    return replace(parameter, shape=tuple(shape))


def _of_one_pass(workload: Workload, model: nn.Module, micro_batch: MicroBatch) -> list[_Collective]:
    collectives: list[_Collective] = []

    def watch(role: Role, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        collectives.extend(_of_layer(workload, role, module, inputs[0], output))

    modules = dict(model.named_modules())
    handles = [
        modules[name].register_forward_hook(partial(watch, role))
        for name, role in plan_of(workload, model).roles.items()
    ]
    inputs, targets = (torch.empty_like(tensor, device="meta") for tensor in (micro_batch.inputs, micro_batch.targets))
    try:
        workload.loss_sum(model, replace(micro_batch, inputs=inputs, targets=targets))
    finally:
        for handle in handles:
            handle.remove()
    return collectives


def _of_layer(
    workload: Workload, role: Role, module: nn.Module, given: Tensor, output: Tensor
) -> Iterator[_Collective]:
    if isinstance(role, RowParallel) or isinstance(module, nn.Embedding):
        yield "all_reduce", output.nbytes
        return
    if given.requires_grad:
        yield "all_reduce", given.nbytes
    if isinstance(role, ColumnParallel):
        return
    if not cuts_logits(workload):
        yield "all_gather", output.nbytes
        return
    num_targets = output.numel() // output.shape[-1]
    itemsize = torch.promote_types(output.dtype, torch.float32).itemsize
    yield from [("all_reduce", num_targets * itemsize)] * 3
