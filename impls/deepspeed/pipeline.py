"""DeepSpeed's pipeline (PipelineModule, 1F1B): its engine runs all micro-batches of a step, torch's fused optimizer
steps each rank's own stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.chain import chain_of, keep_parameters
from harness.evaluation import evaluating
from harness.implementation import DryStep, EvaluationOutput, Implementation, Prediction, StepOutput
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import decay_groups, global_norm, torch_optimizer
from harness.parameters import LogicalParameter, MemoryCategory, logical_parameters
from harness.workload import Batch, Workload
from impls.deepspeed.parts import library, limits, pipeline_dry_run, pipeline_stages
from impls.deepspeed.parts.engine_config import engine_config
from impls.deepspeed.parts.engine_states import engine_states, masters_of
from impls.deepspeed.parts.memory_marks import mark_backward, mark_buffers
from impls.deepspeed.parts.pipeline_stages import Partition, StagePlan, pipeline_module, plan
from impls.deepspeed.parts.whole_tensors import whole_parameters
from impls.deepspeed.parts.zero_costs import reduction_of


class DeepSpeedPipeline(Implementation):
    """`partition` says what stages are to have alike. `stage` is ZeRO's, on a data degree of one: 1 keeps fp32 masters
    and tells the norm that it clips by, which DeepSpeed's pipeline otherwise does not."""

    strategy = "pipeline_parallel"
    libraries = ("deepspeed",)

    @classmethod
    def unavailable(cls) -> str | None:
        return library.why_not_usable()

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        library.compile_for_ranks()

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        stage = options.get("stage", 0)
        return None if stage in (0, 1) else f"stage must be 0 or 1 in a pipeline, got {stage!r}"

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        stage, training, precision = options.get("stage", 0), workload.training, workload.precision
        if (layout.data, layout.tensor) != (1, 1) or layout.pipeline == 1:
            return f"DeepSpeed's pipeline takes a pipeline degree alone here, of at least 2, got {layout}"
        if not stage and training.checks_norm:
            return "DeepSpeed's pipeline tells no gradient norm without ZeRO: it needs stage=1"
        if not stage and precision.master is not None:
            return f"DeepSpeed's pipeline keeps masters in stage 1, got stage 0 in {precision.name}"
        return limits.why_not(workload, device, zero=stage > 0) or pipeline_stages.why_not(
            workload, layout.pipeline, options.get("partition", "flops"), zero=stage > 0
        )

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        planned = plan(workload, layout.pipeline, options.get("partition", "flops"))
        return pipeline_stages.memory_bytes(planned, workload, parameters, zero=options.get("stage", 0) == 1)

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        planned = plan(workload, layout.pipeline, options.get("partition", "flops"))
        num_micro_batches, tells_norm = workload.training.num_micro_batches, options.get("stage", 0) == 1
        return pipeline_stages.wire_bytes(planned, parameters, num_micro_batches, tells_norm=tells_norm)

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        if workload.precision.gradient is workload.precision.compute:
            return {}
        return {"peak": "what DeepSpeed's bf16 optimizer holds of wider gradients in a pipeline has not been found out"}

    @classmethod
    def dry_steps(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Sequence[Callable[[nn.Module], DryStep]]:
        """All ranks': one that holds fewer states may keep more activations."""
        if workload.precision.gradient is not workload.precision.compute:
            return ()
        planned = plan(workload, layout.pipeline, options.get("partition", "flops"))
        return [_dry_step(planned, workload, parameters, rank, options) for rank in range(layout.pipeline)]

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        partition: Partition = "flops",
        stage: int = 0,
    ) -> None:
        self.workload = workload
        self.device = device
        self.group = mesh.group("pipeline")
        self.stage = stage
        self.num_updates = 0
        self._batch: Batch | None = None
        self._losses: list[Tensor] = []
        self._kept: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] | None = None
        self._is_last = mesh.rank == layout.pipeline - 1
        planned = plan(workload, layout.pipeline, partition)
        built = chain_of(workload, workload.build_model)
        self.model = built.model
        registry = logical_parameters(self.model, workload.decays)
        with library.Session(device, mesh.rank, layout.world_size) as self.session:
            self.module = pipeline_module(built, planned, mesh.rank, self._objective)
            own = {name for name, ranks in planned.held_by.items() if mesh.rank in ranks}
            keep_parameters(self.model, own)
            named = dict(self.model.named_parameters())
            trained = [p for p in registry if p.trainable and p.name in own]
            self.trained = {parameter.name: named[parameter.name] for parameter in trained}
            groups = decay_groups(trained, list(self.trained.values()), workload.training.weight_decay)
            self.optimizer = torch_optimizer(workload.training, groups)
            bucket = sum(parameter.numel() for parameter in self.trained.values())  # by itself of 2 GB, of any model
            zero = {"stage": stage, "reduce_bucket_size": bucket} if stage else {"stage": stage}
            self.engine = self.session.engine(self.module, self.optimizer, engine_config(workload, zero))
        mark_backward(self.engine)
        mark_buffers(self.engine)
        self.module.register_forward_pre_hook(self._begin_forward)
        self._num_forwards = 0

    def train_step(self, batch: Batch) -> StepOutput:
        self._begin_batch(batch)
        self._kept, self._gradients = {}, None
        learning_rate = self.workload.training.learning_rate_at(self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with ExitStack() as hooks:
            if self.tracks_gradient_norm:
                for name, parameter in self.trained.items():
                    hooks.callback(parameter.register_hook(partial(self._keep, name)).remove)
            self.engine.train_batch(_samples(batch))
        skipped = not self.engine.was_step_applied()
        self.num_updates += not skipped
        norm = None
        if self.workload.training.checks_norm:
            norm = torch.as_tensor(self.engine.get_global_grad_norm())
        if self.tracks_gradient_norm:
            self._gradients = self._summed(self._kept)
            norm = global_norm(list(self._gradients.values())) if norm is None else norm
        return StepOutput(
            loss_sum=torch.stack(self._losses).double().sum() if self._losses else None,
            num_tokens=batch.num_tokens,
            gradient_norm=norm,
            skipped=skipped,
            learning_rates=(learning_rate,),  # a rank may hold no parameters, and so no groups
        )

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        """Micro-batch by micro-batch: stages expect shapes like the last ones unless told to forget them."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with evaluating(self.module):
            for micro_batch in batch.micro_batches:
                self._begin_batch(replace(batch, micro_batches=(micro_batch,)))
                self.engine.reset_activation_shape()
                samples = iter([(micro_batch.inputs, micro_batch.targets)])
                self.engine.eval_batch(samples, reduce_output=None, bcast_loss=False, num_micro_batches=1)
                total += sum(self._losses)
        self.engine.reset_activation_shape()
        return EvaluationOutput(loss_sum=total if self._is_last else None, num_tokens=batch.num_tokens)

    def _begin_batch(self, batch: Batch) -> None:
        self._batch, self._num_forwards = batch, 0
        self._losses.clear()

    def _begin_forward(self, module: Any, inputs: Any) -> None:
        """1F1B goes forward in the order of the micro-batches."""
        assert self._batch is not None
        self.workload.begin_forward(self._batch.micro_batches[self._num_forwards])
        self._num_forwards += 1

    def _objective(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's share of the global mean, times the number of micro-batches that the engine divides by."""
        assert self._batch is not None
        loss = self.workload.loss(outputs, targets)
        micro_batches = self._batch.micro_batches
        if not micro_batches[len(self._losses)].num_tokens:
            loss = loss * 0.0
        self._losses.append(loss.detach())
        return loss * (len(micro_batches) / self._batch.global_num_tokens)

    def _keep(self, name: str, gradient: Tensor) -> None:
        """Adds one micro-batch's gradient to those before it."""
        own = gradient.detach().to(self.workload.precision.gradient)
        self._kept[name] = self._kept[name] + own if name in self._kept else own.clone()

    def _summed(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of all stages, by name, on the CPU; what several hold a summand of is summed."""
        of_ranks: list[Any] = [None] * self.group.size()
        dist.all_gather_object(of_ranks, {name: value.cpu() for name, value in values.items()}, group=self.group)
        found: dict[str, Tensor] = {}
        for of_rank in of_ranks:
            for name, value in of_rank.items():
                found[name] = found[name] + value if name in found else value
        return found

    def _whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the ranks have of all stages, by name, on the CPU."""
        of_ranks: list[Any] = [None] * self.group.size()
        dist.all_gather_object(of_ranks, {name: value.cpu() for name, value in values.items()}, group=self.group)
        return {name: value for of_rank in reversed(of_ranks) for name, value in of_rank.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        """Of a step that tracked the norm: the engine lets go of them as it steps."""
        assert self._gradients is not None, "deepspeed.pipeline keeps the gradients of steps that track their norm"
        return dict(self._gradients)

    def full_parameters(self) -> dict[str, Tensor]:
        return self._whole(whole_parameters(self.model, self.trained, masters_of(self.engine, self.trained)))

    def full_buffers(self) -> dict[str, Tensor]:
        own = set(self.module.buffers())
        return self._whole({name: buffer for name, buffer in self.model.named_buffers() if buffer in own})

    def required_gradients(self) -> Mapping[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.trained.items() if parameter.numel()}

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        received = [buffer for buffer in self.engine._grad_layer_buf if buffer is not None]
        return {**engine_states(self.engine, self.optimizer), "communication_buffers": received}

    def close(self) -> None:
        self.session.close()


def _dry_step(
    planned: StagePlan,
    workload: Workload,
    parameters: Sequence[LogicalParameter],
    rank: int,
    options: Mapping[str, Any],
) -> Callable[[nn.Module], DryStep]:
    zero = options.get("stage", 0) == 1
    states = pipeline_stages.memory_bytes_of_rank(planned, workload, parameters, rank, zero=zero)
    held = [parameter for parameter in parameters if rank in planned.held_by.get(parameter.name, [])]
    one_step = replace(workload, training=replace(workload.training, num_micro_batches=1))  # as if there were one
    reduction = replace(reduction_of(one_step, held, Layout(), {"stage": 1}), takes_norm=True) if zero else None
    held_bytes = states["parameters"] + states["optimizer_states"]
    return partial(pipeline_dry_run.dry_step, planned, workload, rank, held_bytes=held_bytes, reduction=reduction)


def _samples(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    for micro_batch in batch.micro_batches:
        yield micro_batch.inputs, micro_batch.targets
