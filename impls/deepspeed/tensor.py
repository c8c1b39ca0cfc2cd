"""DeepSpeed's tensor parallelism (AutoTP) in training: its engine replaces the linear layers that the workload's tensor
plan names by ones that hold a slice each, with logits that stay cut for its cross-entropy over parts of a vocabulary;
torch's fused optimizer steps the slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.evaluation import evaluating, sum_losses
from harness.implementation import DryStep, EvaluationOutput, Implementation, Prediction, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import decay_groups, global_norm, norm_over_ranks, torch_optimizer
from harness.parameters import LogicalParameter, MemoryCategory, logical_parameters
from harness.workload import Batch, Workload
from impls.deepspeed.parts import library, limits, tensor_costs, tensor_dry_run
from impls.deepspeed.parts.clipping_norm import keep_norm
from impls.deepspeed.parts.engine_config import engine_config
from impls.deepspeed.parts.engine_states import engine_states, masters_of
from impls.deepspeed.parts.memory_marks import mark_buffers
from impls.deepspeed.parts.tensor_slices import Head, slices_of


class DeepSpeedTensorParallel(Implementation):
    """`head="cut"` cuts the head by the vocabulary, and with it an embedding that shares its weight; DeepSpeed's
    cross-entropy takes the logits as they are cut. Where the loss is another, or the heads are several, it falls back
    to `gathered`: a cut head whose logits every rank gathers, but for one that shares an embedding's weight, which
    stays whole. Under `whole` every rank computes all logits. Other embeddings are whole on every rank."""

    strategy = "tensor_parallel"
    libraries = ("deepspeed",)

    @classmethod
    def unavailable(cls) -> str | None:
        return library.why_not_usable()

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        library.compile_for_ranks()

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.data, layout.pipeline) != (1, 1):
            return f"AutoTP takes a tensor degree alone here, got {layout}"
        if workload.precision.master is not None and workload.training.clip_norm is not None:
            return "DeepSpeed clips in bf16 by a norm that leaves out the slices of all ranks but the first"
        return limits.why_not(workload, device, zero=False) or workload.fits_tensor_degree(layout.tensor)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return tensor_costs.memory_bytes(workload, parameters, layout, head=_head(layout, options))

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        if workload.training.activation_checkpointing:
            return None
        return tensor_costs.wire_bytes(workload, layout, head=_head(layout, options))

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        if not workload.training.activation_checkpointing:
            return {}
        return {"bytes": "backward computes blocks again as far as torch finds it necessary, sums included"}

    @classmethod
    def dry_steps(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Sequence[Callable[[nn.Module], DryStep]]:
        head = _head(layout, options)
        states = tensor_costs.memory_bytes(workload, parameters, layout, head=head)
        held_bytes = states["parameters"] + states["optimizer_states"]
        return [partial(tensor_dry_run.dry_step, workload, layout.tensor, held_bytes=held_bytes, head=head)]

    def __init__(
        self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device, *, head: Head = "cut"
    ) -> None:
        self.workload = workload
        self.device = device
        self.group = mesh.group("tensor")
        self.num_updates = 0
        self.module = workload.build_model().to(device)
        registry = [p for p in logical_parameters(self.module, workload.decays) if p.trainable]
        named = dict(self.module.named_parameters())
        self.trained = {parameter.name: named[parameter.name] for parameter in registry}
        groups = decay_groups(registry, list(self.trained.values()), workload.training.weight_decay)
        self.optimizer = torch_optimizer(workload.training, groups)
        self._cut = slices_of(self.module, workload, head=_head(layout, {"head": head}))
        config = engine_config(workload, {"stage": 0})
        config["tensor_parallel"] = {"autotp_size": layout.tensor, **self._cut.configuration}
        if self._cut.cut_head is not None:
            vars(self.module)["loss_function"] = workload.loss  # in its place DeepSpeed puts its own
        with library.Session(device, mesh.rank, layout.world_size) as self.session:
            self.engine = self.session.engine(self.module, self.optimizer, config)
        if self._cut.cut_head is not None:
            self.workload = replace(workload, loss=self._loss_of_parts())
        mark_buffers(self.engine)
        keep_norm(self.engine)
        self._gradients: dict[str, Tensor] | None = None

    def train_step(self, batch: Batch) -> StepOutput:
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        learning_rate = self.workload.training.learning_rate_at(self.num_updates)
        self._gradients = None
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            self.engine.set_gradient_accumulation_boundary(index == last)
            with phase("forward"):
                loss = self.workload.loss_sum(self.engine, micro_batch)
                objective = loss / batch.global_num_tokens
            with phase("backward"):
                self.engine.backward(objective, scale_wrt_gas=False)  # `objective` is scaled already
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        if self.tracks_gradient_norm:
            self._gradients = self._whole_gradients()
        with phase("optimizer"):
            norm, skipped = self._step(learning_rate)
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=norm,
            skipped=skipped,
            learning_rates=(learning_rate,) * len(self.optimizer.param_groups),
        )

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        with evaluating(self.module):
            return sum_losses(batch, partial(self.workload.loss_sum, self.engine), self.device)

    def _loss_of_parts(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The engine's loss of logits of which each rank has a part, the same on every rank. Collective: with its first
        target the ranks tell each other which parts they have, once."""
        loss: Any = self.module.loss_function
        own = self.module.get_parameter(f"{self._cut.cut_head}.weight").detach()

        def loss_sum(outputs: Tensor, targets: Tensor) -> Tensor:
            summed: Tensor = loss(outputs.flatten(0, -2), shift_labels=targets.flatten(), num_items_in_batch=1)
            return summed

        loss_sum(own.new_zeros(1, len(own)), torch.zeros(1, dtype=torch.long, device=own.device))
        return loss_sum

    def _step(self, learning_rate: float) -> tuple[Tensor | None, bool]:
        training, norm = self.workload.training, None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if training.skip_nonfinite or self.tracks_gradient_norm:
            norm = self._norm()
            if training.skip_nonfinite and not bool(torch.isfinite(norm)):
                self.engine.zero_grad()
                return norm, True
        self.engine.step()
        if norm is None and training.clip_norm is not None:
            norm = torch.as_tensor(self.engine.get_global_grad_norm())
        skipped = not self.engine.was_step_applied()
        self.num_updates += not skipped
        return norm, skipped

    def _norm(self) -> Tensor:
        """In fp64. What is whole counts on the first rank."""
        is_first = dist.get_rank(self.group) == 0
        counted = [
            parameter.grad
            for name, parameter in self.trained.items()
            if parameter.grad is not None and (is_first or name in self._cut.slices)
        ]
        return norm_over_ranks(global_norm(counted).to(self.device), self.group)

    def _whole_gradients(self) -> dict[str, Tensor]:
        gradients = {name: parameter.grad for name, parameter in self.trained.items() if parameter.grad is not None}
        return {name: self._cut.whole(name, gradient, self.group) for name, gradient in gradients.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        """Of a step that tracked the norm: the engine lets go of them as it steps."""
        assert self._gradients is not None, "deepspeed.tensor keeps the gradients of steps that track their norm"
        return dict(self._gradients)

    def full_parameters(self) -> dict[str, Tensor]:
        held = {**dict(self.module.named_parameters()), **masters_of(self.engine, self.trained)}
        return {name: self._cut.whole(name, tensor, self.group) for name, tensor in held.items()}

    def facts(self) -> Mapping[str, str]:
        """What has become of the head."""
        return {"head": self._cut.head}

    def replicated_tensors(self) -> Iterable[Tensor]:
        yield from self.module.parameters()
        yield from self.module.buffers()

    def required_gradients(self) -> Mapping[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.trained.items() if parameter.numel()}

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return engine_states(self.engine, self.optimizer)

    def close(self) -> None:
        self.session.close()


def _head(layout: Layout, options: Mapping[str, Any]) -> Head:
    """AutoTP leaves a single rank's model alone."""
    head: Head = options.get("head", "cut") if layout.tensor > 1 else "whole"
    return head
