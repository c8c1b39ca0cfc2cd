"""One rank's stages of a chain under one of torch's schedules, and a step through them.

Torch knows no parameters that stages share: the ranks that hold one sum its gradient when the schedule is through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.chain import Border, as_value, borders, chain_of, keep_parameters
from harness.evaluation import evaluating
from harness.implementation import EvaluationOutput
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import global_norm, norm_over_ranks
from harness.workload import Batch, Workload
from impls.torch.parts import pipeline_schedules
from impls.torch.parts.pipeline_evaluation import Forward, forward_through
from impls.torch.parts.pipeline_plan import plan
from impls.torch.parts.pipeline_stage import StageModule, make_stage, received_tensors


class PipelineModel:
    """The stages of this rank; of the model that is built whole only their parameters stay in `module`. `options` are
    those of torch.pipeline. Collective over the mesh."""

    def __init__(
        self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device, options: Mapping[str, Any]
    ) -> None:
        self._workload, self._device = workload, device
        self._group = mesh.group("pipeline")
        self._rank = self._group.rank()
        self._plan = plan(workload, layout, options)
        chain = chain_of(workload, workload.build_model)
        self.module = chain.model
        keep_parameters(self.module, self._plan.names_on(self._rank))
        self.module.to(device)
        own = self._plan.stages_on(self._rank)
        modules = {stage: StageModule([chain.blocks[index] for index in self._plan.stages[stage]]) for stage in own}
        self._modules = modules
        self._stages = [make_stage(self._plan, stage, module, device, self._group) for stage, module in modules.items()]
        self._schedule = pipeline_schedules.make(
            options.get("schedule", "1f1b"), self._stages, workload.training.num_micro_batches, self._objective
        )
        self._is_first, self._is_last = 0 in own, self._plan.num_stages - 1 in own
        sharing = sorted({tuple(ranks) for ranks in self._plan.held_by.values() if len(ranks) > 1})
        self._ties = {ranks: mesh.part("pipeline", ranks) for ranks in sharing}
        self._evaluated_borders: dict[tuple[int, ...], tuple[Border, ...]] = {}  # by the inputs' shape
        self._losses: list[Tensor] = []
        self._num_tokens: list[int] = []

    def forward_backward(self, batch: Batch) -> tuple[Tensor | None, int]:
        """All micro-batches; the sum of their losses, None where the loss does not live, and the number of targets.
        ValueError where they are not shaped as the stages were told."""
        self._check_shapes(batch)
        self._losses.clear()
        self._num_tokens = [micro_batch.num_tokens for micro_batch in batch.micro_batches]
        for stage in self._stages:
            stage.begin = lambda index: self._workload.begin_forward(batch.micro_batches[index])
        inputs = [torch.cat([micro_batch.inputs for micro_batch in batch.micro_batches])] if self._is_first else []
        targets = torch.cat([micro_batch.targets for micro_batch in batch.micro_batches]) if self._is_last else None
        self._schedule.step(
            *inputs, target=targets, return_outputs=False, loss_kwargs={"num_tokens": batch.global_num_tokens}
        )
        loss_sum = torch.stack(self._losses).double().sum() if self._is_last else None
        return loss_sum, sum(self._num_tokens)

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        """The sum of the losses, None where the loss does not live. Collective."""
        losses: list[Tensor] = []
        found = [self._borders(micro_batch.inputs) for micro_batch in batch.micro_batches]
        handed = [[of_blocks[blocks.stop - 1] for of_blocks in found] for blocks in self._plan.stages]
        with evaluating(self.module, *self._modules.values()):
            forwards = {stage: self._forward(stage, batch, losses) for stage in self._modules}
            forward_through(forwards, self._plan.rank_of, handed, self._group, self._device)
        loss_sum = torch.stack(losses).double().sum() if self._is_last else None
        return EvaluationOutput(loss_sum=loss_sum, num_tokens=batch.num_tokens)

    def _forward(self, stage: int, batch: Batch, losses: list[Tensor]) -> Forward:
        def forward(index: int, inputs: Sequence[Tensor]) -> list[Tensor]:
            micro_batch = batch.micro_batches[index]
            self._workload.begin_forward(micro_batch)
            outputs = self._modules[stage].tensors(inputs or [micro_batch.inputs])
            if stage == self._plan.num_stages - 1:
                loss = self._workload.loss(as_value(outputs), micro_batch.targets)
                losses.append(loss if micro_batch.num_tokens else loss * 0.0)
            return outputs

        return forward

    def _borders(self, inputs: Tensor) -> tuple[Border, ...]:
        shape = tuple(inputs.shape)
        if shape not in self._evaluated_borders:
            self._evaluated_borders[shape] = borders(self._workload, inputs, evaluates=True)
        return self._evaluated_borders[shape]

    def reduce(self) -> None:
        """The gradients of parameters that several ranks hold, between them."""
        parameters = dict(self.module.named_parameters())
        for name, ranks in self._plan.held_by.items():
            if len(ranks) == 1 or self._rank not in ranks or not parameters[name].requires_grad:
                continue
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self._ties[tuple(ranks)])

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm over all stages, of those of this rank; what several ranks hold counts on the first of them."""
        counted = [gradient for name, gradient in gradients.items() if self._plan.held_by[name][0] == self._rank]
        return norm_over_ranks(global_norm(counted).to(self._device), self._group)

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the ranks have of all stages, by name, on the CPU. Collective; not for timed code."""
        of_ranks: list[Any] = [None] * self._group.size()
        dist.all_gather_object(of_ranks, {name: value.cpu() for name, value in values.items()}, group=self._group)
        found: dict[str, Tensor] = {}
        for of_rank in of_ranks:
            found |= {name: value for name, value in of_rank.items() if name not in found}
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Those of this rank's stages, by name."""
        own = {buffer for stage in self._stages for buffer in stage.submod.buffers()}
        return {name: buffer.detach() for name, buffer in self.module.named_buffers() if buffer in own}

    def received(self) -> Iterable[Tensor]:
        """The memory in which activations and gradients arrive."""
        for stage in self._stages:
            yield from received_tensors(stage)

    def facts(self) -> Mapping[str, str]:
        return {"torch_schedule": type(self._schedule).__name__}

    def _objective(self, outputs: Tensor, targets: Tensor, *, num_tokens: int) -> Tensor:
        """A micro-batch's share of the global mean; torch asks in the order of the micro-batches."""
        loss = self._workload.loss(outputs, targets)
        if not self._num_tokens[len(self._losses)]:
            loss = loss * 0.0
        self._losses.append(loss.detach())
        objective = loss / num_tokens
        self._stages[-1].end_of_loss()
        return objective

    def _check_shapes(self, batch: Batch) -> None:
        expected = self._plan.inputs[0][0].shape
        for micro_batch in batch.micro_batches:
            if tuple(micro_batch.inputs.shape) != expected:
                raise ValueError(
                    f"torch's stages expect micro-batches of {expected}, step {batch.step} has one of "
                    f"{tuple(micro_batch.inputs.shape)}"
                )
