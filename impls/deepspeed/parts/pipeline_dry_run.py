"""A step of one rank of DeepSpeed's pipeline on tensors without memory: what its engine keeps from one instruction to
the next. See harness.implementation.DryStep.

    moment     0    1    2    3    4    5    6    7        forward of micro-batch i on stage s of p: s + 2i
    stage 0   F0        F1   B0        B1                  backward of it:                         2(i + p) - 1 - s
    stage 1        F0   B0   F1   B1                       here p = 2
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from harness.chain import Border, as_value, keep_parameters
from harness.implementation import DryStep
from harness.workload import Batch, Workload
from impls.deepspeed.parts.pipeline_stages import Stage, StagePlan
from impls.deepspeed.parts.zero_dry_run import LentInBackward, Reduction


def dry_step(
    planned: StagePlan,
    workload: Workload,
    rank: int,
    module: nn.Module,
    *,
    held_bytes: int,
    reduction: Reduction | None,
) -> DryStep:
    """That of `rank`, which holds `held_bytes` of parameters and optimizer states. `reduction` is ZeRO's; without it
    gradients are copied into one flat tensor, though there is nobody to sum with."""
    engine = _Engine(planned, workload, rank, module, reduction)

    def take(batch: Batch) -> None:
        engine.step(batch)
        engine.step(batch)  # which finds what the one before has left

    held = [*module.parameters(), *module.buffers()]
    return DryStep(held_bytes=held_bytes, held=held, batch=workload.batch(0), take=take)


def actions(rank: int, num_stages: int, num_micro_batches: int) -> Iterator[tuple[str, int]]:
    """Forwards ("F") and backwards ("B") of a rank with their micro-batches, in order."""
    moments = [(rank + 2 * index, "F", index) for index in range(num_micro_batches)]
    moments += [(2 * (index + num_stages) - 1 - rank, "B", index) for index in range(num_micro_batches)]
    for _, kind, index in sorted(moments):
        yield kind, index


class _Engine:
    """Inputs and outputs of micro-batches lie in slots. A sent gradient frees the inputs, a backward the outputs, but
    for the last stage's, which stay until another micro-batch comes into their slot."""

    def __init__(
        self, planned: StagePlan, workload: Workload, rank: int, module: nn.Module, reduction: Reduction | None
    ) -> None:
        self._workload, self._rank, self._num_stages = workload, rank, len(planned.stages)
        self._reduction = reduction
        assert workload.chain is not None
        blocks = list(workload.chain(module))
        self._stage = Stage([blocks[index] for index in planned.stages[rank]])
        keep_parameters(module, {name for name, ranks in planned.held_by.items() if rank in ranks})
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._device = next(module.parameters()).device
        self._is_first, self._is_last = rank == 0, rank + 1 == self._num_stages
        self._before: Border = () if self._is_first else planned.outputs[rank - 1]
        self._after: Border = () if self._is_last else planned.outputs[rank]
        self._places: list[Tensor] = []
        self._received: list[Tensor] = []
        self._received_gradients: list[Tensor] = []
        self._inputs: dict[int, list[Tensor]] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        self._loss: Tensor | None = None
        self._lent: LentInBackward | None = None  # in this step

    def step(self, batch: Batch) -> None:
        if not self._places:
            self._make_places()
        num_micro_batches = len(batch.micro_batches)
        num_slots = max(2, min(self._num_stages - self._rank, num_micro_batches))
        for kind, index in actions(self._rank, self._num_stages, num_micro_batches):
            if kind == "F":
                self._forward(batch, index, num_slots)
            else:
                self._backward(index % num_slots)
        self._reduce()

    def _make_places(self) -> None:
        """One place serves activations and gradients alike, tensor by tensor, where it is large enough."""
        self._received = [self._empty(shape.shape, shape.dtype) for shape in self._before]
        self._places = list(self._received)
        gradients = [shape for shape in self._after if shape.dtype.is_floating_point]
        for index, shape in enumerate(gradients):
            num_elements = torch.Size(shape.shape).numel()
            if index >= len(self._places):
                self._places.append(self._empty(shape.shape, shape.dtype))
            elif self._places[index].numel() < num_elements:
                self._places[index] = self._empty(shape.shape, shape.dtype)
            place = self._places[index]
            self._received_gradients.append(place.flatten()[:num_elements].view(shape.shape))

    def _forward(self, batch: Batch, index: int, num_slots: int) -> None:
        micro_batch, slot = batch.micro_batches[index], index % num_slots
        kept = [tensor.clone() for tensor in ([micro_batch.inputs] if self._is_first else self._received)]
        for tensor in () if self._is_first else kept:
            tensor.requires_grad_(tensor.is_floating_point())
        self._inputs[slot] = kept
        inputs = [tensor.clone() for tensor in kept]
        self._workload.begin_forward(micro_batch)
        # The last ones outlive the step, so that the instrument does not take them for activations.
        outlives = self._is_last and index >= len(batch.micro_batches) - num_slots
        outputs = (self._stage.outputs if outlives else self._stage)(as_value(inputs))
        self._outputs[slot] = list(outputs) if isinstance(outputs, tuple) else [outputs]
        if self._is_last:
            loss = self._workload.loss(outputs, micro_batch.targets)
            self._loss = loss * (len(batch.micro_batches) / batch.global_num_tokens)

    def _backward(self, slot: int) -> None:
        if self._reduction is not None and self._lent is None:
            self._lent = LentInBackward(self._reduction, self._trained)
            self._lent.make_bucket()
        if self._is_last:
            assert self._loss is not None
            self._loss.backward()
        else:
            outputs = [tensor for tensor in self._outputs.pop(slot) if tensor.is_floating_point()]
            last = len(outputs) - 1
            for index, (output, gradient) in enumerate(zip(outputs, self._received_gradients, strict=True)):
                output.backward(gradient=gradient, retain_graph=index < last)
        if not self._is_first:
            del self._inputs[slot]

    def _reduce(self) -> None:
        """And the update."""
        if self._lent is None:
            for dtype in {parameter.dtype for parameter in self._trained.values()}:
                alike = [parameter.numel() for parameter in self._trained.values() if parameter.dtype == dtype]
                self._empty((sum(alike),), dtype)
        else:
            self._lent.make_bucket()  # though backward has made one
            self._lent.end_backward()
            self._lent = None
        for parameter in self._trained.values():
            parameter.grad = None

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)
