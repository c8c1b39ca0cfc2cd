"""FairScale's model-parallel layers in the place of the workload's own, by its tensor plan, with logits that stay cut
for its cross-entropy (Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.data import IGNORE_INDEX
from harness.evaluation import evaluating, sum_losses
from harness.implementation import DryStep, EvaluationOutput, Implementation, Prediction, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer, global_norm, norm_over_ranks
from harness.parameters import LogicalParameter, MemoryCategory
from harness.tensor_plan import VocabularyParallel
from harness.workload import Batch, Workload
from impls.fairscale.parts import library
from impls.fairscale.parts.parallel_costs import memory_bytes, step_wire_bytes
from impls.fairscale.parts.parallel_layers import cut, cuts_logits, plan_of
from impls.fairscale.parts.tensor_dry_run import dry_step


class FairScaleTensorParallel(Implementation):
    """Embedding and head are cut by the vocabulary, which has to divide. The recipe steps each rank's slices."""

    strategy = "tensor_parallel"
    libraries = ("fairscale",)
    makes_gradients = True

    @classmethod
    def unavailable(cls) -> str | None:
        return library.why_unavailable()

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.data, layout.pipeline) != (1, 1):
            return f"FairScale's layers take a tensor degree alone, got {layout}"
        precision = workload.precision
        if precision.gradient != precision.compute:
            return f"gradients have the parameters' dtype, got {precision.name} with gradients in {precision.gradient}"
        return workload.fits_tensor_degree(layout.tensor) or _why_not_vocabulary(workload, layout.tensor)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return memory_bytes(workload, parameters, layout.tensor)

    @classmethod
    def dry_steps(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Sequence[Callable[[nn.Module], DryStep]]:
        states = memory_bytes(workload, parameters, layout.tensor)
        held_bytes = states["parameters"] + states["optimizer_states"]
        return [partial(dry_step, workload, layout.tensor, held_bytes=held_bytes)]

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        return step_wire_bytes(workload, parameters, layout.tensor)

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        if not workload.training.activation_checkpointing:
            return {}
        return {"bytes": "backward computes blocks again as far as torch finds it necessary, sums included"}

    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        from fairscale.nn.model_parallel import initialize

        self.workload = replace(workload, loss=_cross_entropy_of_parts) if cuts_logits(workload) else workload
        self.device = device
        initialize.initialize_model_parallel(layout.tensor)
        self.group = initialize.get_model_parallel_group()
        self.module = workload.build_model()
        self._cut = cut(self.module, workload)
        self.module.to(device)
        self.optimizer = RecipeOptimizer(
            workload.model_without_memory(), workload, stepped=dict(self.module.named_parameters())
        )

    def train_step(self, batch: Batch) -> StepOutput:
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        self.optimizer.clear_gradients()
        for micro_batch in batch.micro_batches:
            with phase("forward"):
                loss = self.workload.loss_sum(self.module, micro_batch)
            with phase("backward"):
                (loss / batch.global_num_tokens).backward()
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        with phase("reduce"):
            for name, parameter in self.module.named_parameters():
                if name in self._cut.partial and parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.group)
        with phase("optimizer"):
            update = self.optimizer.step(tracks_norm=self.tracks_gradient_norm, norm_of=self._norm)
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=update.gradient_norm,
            skipped=update.skipped,
            learning_rates=update.learning_rates,
        )

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        with evaluating(self.module):
            return sum_losses(batch, partial(self.workload.loss_sum, self.module), self.device)

    def _norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """What is whole on every rank counts once, on the first."""
        is_first = dist.get_rank(self.group) == 0
        counted = [gradient for name, gradient in gradients.items() if is_first or name in self._cut.slices]
        return norm_over_ranks(global_norm(counted).to(self.device), self.group)

    def full_gradients(self) -> dict[str, Tensor]:
        gradients = self.optimizer.unclipped_gradients()
        return {name: self._cut.whole(name, gradient, self.group) for name, gradient in gradients.items()}

    def full_parameters(self) -> dict[str, Tensor]:
        parameters = self.optimizer.full_parameters(self.module)
        return {name: self._cut.whole(name, parameter, self.group) for name, parameter in parameters.items()}

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": self.optimizer.live_gradients(),
            "optimizer_states": self.optimizer.state_tensors(),
        }

    def close(self) -> None:
        """FairScale keeps one set of groups for the whole process, and forgets them without ending them."""
        from fairscale.nn.model_parallel import initialize

        groups = (
            initialize.get_model_parallel_group(),
            initialize.get_data_parallel_group(),
            initialize.get_pipeline_parallel_group(),
        )
        initialize.destroy_model_parallel()
        for group in groups:
            dist.destroy_process_group(group)


def _cross_entropy_of_parts(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of logits of which each rank has a part, (..., vocabulary / ranks), the sum over targets that count; the same on
    every rank. FairScale's has no index to ignore: such targets are on no rank, and their losses go."""
    from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy

    logits = outputs.flatten(0, -2)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses: Tensor = vocab_parallel_cross_entropy(logits, targets.flatten())
    return torch.where(targets.flatten() != IGNORE_INDEX, losses, 0.0).sum()


def _why_not_vocabulary(workload: Workload, num_ranks: int) -> str | None:
    model = workload.model_without_memory()
    for name, role in plan_of(workload, model).roles.items():
        num_rows = len(model.get_parameter(f"{name}.weight"))
        if isinstance(role, VocabularyParallel) and num_rows % num_ranks:
            return f"FairScale cuts a vocabulary evenly: the {num_rows} rows of {name} do not divide by {num_ranks}"
    return None
