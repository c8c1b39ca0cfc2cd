"""DeepSpeed's engine as its best users run it (ZeRO: Rajbhandari et al. 2020): torch's fused optimizer, which steps
what the engine puts in its place, and buckets of the model's size.

    stage  parameters  gradients  masters, moments   gradients are               what follows
    0      whole       whole      whole              all-reduced after backward
    1      whole       whole      shards             all-reduced after backward  parameters are gathered
    2      whole       shards     shards             all-reduced in backward     parameters are gathered
    3      shards      shards     shards             reduce-scattered in it      before each module that needs them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harness.evaluation import evaluating, sum_losses
from harness.implementation import (
    EvaluationOutput,
    Implementation,
    Prediction,
    Preparation,
    StepOutput,
    as_it_is,
    lending,
    phase,
)
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import decay_groups, global_norm, torch_optimizer
from harness.parameters import LogicalParameter, MemoryCategory, logical_parameters
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, MicroBatch, Workload
from impls.deepspeed.parts import library, zero_3_dry_run, zero_config, zero_costs, zero_dry_run
from impls.deepspeed.parts.clipping_norm import keep_norm
from impls.deepspeed.parts.engine_config import engine_config
from impls.deepspeed.parts.engine_states import engine_states, masters_of
from impls.deepspeed.parts.first_gradient import at_first_gradient, gradients_come_late
from impls.deepspeed.parts.whole_tensors import broadcast_buffers, whole_gradients, whole_parameters

LossScaling = Literal["global_tokens", "rank_mean"]
"""What a loss is divided by: the count of the whole global batch; or each rank's own, micro-batch by micro-batch, as
models do that return a mean."""
Clipping = Literal["recipe", "default"]
"""By the norm of the recipe, or not at all; or as DeepSpeed does that is told nothing."""


class DeepSpeedZero(Implementation):
    """`stage` 0 is data parallelism. The options that DeepSpeed's configuration has too are called as there; None
    leaves the choice to it, but for `reduce_bucket_size` (in elements), which is then that of the model.

    DeepSpeed averages over ranks. Told the loss times their number over the global token count, it trains what one
    process does; `loss_scaling="rank_mean"` is the mean of the ranks' means instead, which parts from it where counts
    are unequal. It clips at 1.0 unless it is told otherwise, which `clipping="default"` leaves it to. `cpu_adam` is the
    same update as torch's AdamW, in DeepSpeed's code.
    """

    libraries = ("deepspeed",)
    strategy = "zero_1"
    strategy_option = "stage"

    @classmethod
    def unavailable(cls) -> str | None:
        return library.why_not_usable()

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> None:
        library.compile_for_ranks(cpu_adam=bool(options.get("cpu_adam")))

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        return zero_config.refused(options)

    @classmethod
    def strategy_of(cls, options: Mapping[str, Any]) -> str:
        stage = options.get("stage", 1)
        return f"zero_{stage}" if stage else "data_parallel"

    @classmethod
    def comparable_strategies(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        if options.get("stage", 1) == 3 and zero_config.keeps_gathered(options):
            return ("zero_3", "zero_2")
        return (cls.strategy_of(options),)

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        return zero_config.why_not(workload, layout, device, options)

    @classmethod
    def other_work(cls, workload: Workload, layout: Layout, options: Mapping[str, Any]) -> str | None:
        return zero_config.other_work(workload, layout, options)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return zero_costs.memory_bytes(zero_config.clipped(workload, options), parameters, layout, options)

    @classmethod
    def predicted_late_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int:
        if zero_config.keeps_whole_fp32_gradients(workload, options):
            return zero_costs.low_precision_gradient_bytes(workload, parameters)
        if not zero_config.lends_in_backward(workload, options):
            return 0
        states = cls.predicted_memory(workload, parameters, layout, options) or {}
        return states.get("gradients", 0) + states.get("communication_buffers", 0)

    @classmethod
    def dry_run_preparation(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Preparation:
        if options.get("stage", 1) == 3:
            return partial(
                zero_3_dry_run.prepare, gathering=zero_costs.gathering_of(workload, parameters, layout, options)
            )
        if zero_config.keeps_whole_fp32_gradients(workload, options):
            return gradients_come_late
        if not zero_config.lends_in_backward(workload, options):
            return as_it_is
        return partial(zero_dry_run.prepare, reduction=zero_costs.reduction_of(workload, parameters, layout, options))

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        return zero_costs.wire_bytes(zero_config.clipped(workload, options), parameters, layout, options)

    @classmethod
    def beyond_the_textbook(cls, device: torch.device, options: Mapping[str, Any]) -> str | None:
        return zero_config.beyond_the_textbook(device, options)

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        return zero_costs.traffic_of(zero_config.clipped(workload, options), parameters, layout, options)

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        workload = zero_config.clipped(workload, options)
        reasons: dict[Prediction, str | None] = {
            "states": zero_costs.why_no_memory(parameters, options),
            "bytes": zero_costs.why_no_bytes(workload, parameters, layout, options),
        }
        reasons["peak"] = reasons["states"]
        return {figure: reason for figure, reason in reasons.items() if reason is not None}

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        stage: int = 1,
        clipping: Clipping = "recipe",
        loss_scaling: LossScaling = "global_tokens",
        reduce_bucket_size: int | None = None,
        overlap_comm: bool | None = None,
        reduce_scatter: bool = True,
        contiguous_gradients: bool = True,
        use_multi_rank_bucket_allreduce: bool = True,
        stage3_param_persistence_threshold: int | None = None,
        stage3_max_reuse_distance: int | None = None,
        stage3_prefetch_bucket_size: int | None = None,
        zero_hpz_partition_size: int = 1,
        memory_efficient_linear: bool = True,
        offload_optimizer: bool = False,
        cpu_adam: bool = False,
    ) -> None:
        options = {
            "stage": stage,
            "reduce_bucket_size": reduce_bucket_size,
            "overlap_comm": overlap_comm,
            "reduce_scatter": reduce_scatter,
            "contiguous_gradients": contiguous_gradients,
            "use_multi_rank_bucket_allreduce": use_multi_rank_bucket_allreduce,
            "stage3_param_persistence_threshold": stage3_param_persistence_threshold,
            "stage3_max_reuse_distance": stage3_max_reuse_distance,
            "stage3_prefetch_bucket_size": stage3_prefetch_bucket_size,
            "zero_hpz_partition_size": zero_hpz_partition_size,
            "memory_efficient_linear": memory_efficient_linear,
            "offload_optimizer": offload_optimizer,
        }
        workload = zero_config.clipped(workload, {"clipping": clipping})
        self.workload = workload
        self.device = device
        self.data_degree = layout.data
        self.data_group = mesh.group("data")
        self.stage = stage
        self.loss_scaling = loss_scaling
        self.num_updates = 0
        self.module = workload.build_model().to(device)
        registry = logical_parameters(self.module, workload.decays)
        trained = [parameter for parameter in registry if parameter.trainable]
        named = dict(self.module.named_parameters())
        self.trained = {parameter.name: named[parameter.name] for parameter in trained}
        groups = decay_groups(trained, list(self.trained.values()), workload.training.weight_decay)
        if zero_config.lends_in_backward(workload, options) and stage:
            # As the engine does by itself, but where the memory instrument can tell what it allocates.
            at_first_gradient(self.trained.values(), self._make_buckets)
        with library.Session(device, mesh.rank, layout.world_size) as self.session:
            make = library.cpu_adam if cpu_adam else torch_optimizer
            self.optimizer = make(workload.training, groups)
            config = engine_config(workload, zero_config.zero_config(registry, workload, options))
            self.engine = self.session.engine(self.module, self.optimizer, config)
        if not stage:
            keep_norm(self.engine)
        self._leaves_out_norm = zero_config.may_leave_out_norm(workload, options)
        self._gradients: dict[str, Tensor] | None = None

    def train_step(self, batch: Batch) -> StepOutput:
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        learning_rate = self.workload.training.learning_rate_at(self.num_updates)
        asks_for_norm = self.workload.training.checks_norm or self.tracks_gradient_norm
        self._gradients = None
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            self.engine.set_gradient_accumulation_boundary(index == last)
            with phase("forward"):
                loss = self.workload.loss_sum(self.engine, micro_batch)
                objective = loss * self._loss_scale(batch, micro_batch)
            with phase("backward"):
                self.engine.backward(objective, scale_wrt_gas=False)  # `objective` is scaled already
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        if self.tracks_gradient_norm:
            self._gradients = whole_gradients(self.trained)
        with phase("optimizer"):
            norm, skipped = self._step(learning_rate, asks_for_norm=asks_for_norm)
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=norm,
            skipped=skipped,
            learning_rates=(learning_rate,) * len(self.optimizer.param_groups),
        )

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        with evaluating(self.module):
            broadcast_buffers(self.module.buffers(), self.data_group)  # each rank has trained its own
            output = sum_losses(batch, partial(self.workload.loss_sum, self.engine), self.device)
        if self.stage == 3:
            self.engine.empty_partition_cache()
        return output

    def _make_buckets(self) -> None:
        with lending("communication_buffers"):
            self.engine.optimizer.setup_buckets()

    def _loss_scale(self, batch: Batch, micro_batch: MicroBatch) -> float:
        if self.loss_scaling == "rank_mean":
            return 1.0 / (max(micro_batch.num_tokens, 1) * len(batch.micro_batches))
        return self.data_degree / batch.global_num_tokens

    def _step(self, learning_rate: float, *, asks_for_norm: bool) -> tuple[Tensor | None, bool]:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm: Any = None
        if not self.stage and (self.workload.training.skip_nonfinite or self.tracks_gradient_norm):
            # Without ZeRO the engine has no rule for a norm that is not finite, and takes none unless it clips.
            norm = global_norm([p.grad for p in self.trained.values() if p.grad is not None])
            if self.workload.training.skip_nonfinite and not bool(torch.isfinite(norm)):
                self.engine.zero_grad()
                return norm, True
        if self._leaves_out_norm:
            self.engine.optimizer.compute_grad_norm = asks_for_norm
        self.engine.step()
        skipped = not self.engine.was_step_applied()
        if skipped and self.stage == 3:
            self._gather_persistent()
        self.num_updates += not skipped
        if norm is None and asks_for_norm:
            norm = torch.as_tensor(self.engine.get_global_grad_norm())
        return norm, skipped

    def _gather_persistent(self) -> None:
        """What DeepSpeed would do in the next forward, but at once, as after a step that is taken: in a step without
        communication ranks may disagree on whether to take it, and be out of step from then on."""
        persistent = self.engine.optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def full_gradients(self) -> dict[str, Tensor]:
        """Of a step that tracked the norm: the engine lets go of them as it steps."""
        assert self._gradients is not None, "deepspeed.zero keeps the gradients of steps that track their norm"
        return dict(self._gradients)

    def full_parameters(self) -> dict[str, Tensor]:
        return whole_parameters(self.module, self.trained, masters_of(self.engine, self.trained))

    def facts(self) -> Mapping[str, str]:
        """Which of DeepSpeed's optimizers steps, and what it does where the norm is not finite."""
        skips = self.stage and not zero_config.keeps_whole_fp32_gradients(self.workload, {"stage": self.stage})
        rule = "skipped" if skips else "by the recipe"
        return {"deepspeed_optimizer": type(self.engine.optimizer).__name__, "nonfinite_steps": rule}

    def replicated_tensors(self) -> Iterable[Tensor]:
        if self.stage < 3:
            yield from self.module.parameters()

    def required_gradients(self) -> Mapping[str, nn.Parameter]:
        """Stage 3 leaves a parameter without elements where it takes them away."""
        return {name: p for name, p in self.trained.items() if getattr(p, "ds_numel", p.numel())}

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return engine_states(self.engine, self.optimizer)

    def close(self) -> None:
        self.session.close()
