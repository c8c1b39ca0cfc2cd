"""The sharded optimizer: every rank keeps and steps only its shard of the optimizer states (stage 1), of the gradients
too (stage 2), and of the parameters as well (stage 3): Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models".

    stage 1, 2   forward, backward -> reduce-scatter a bucket when its last gradient is there
                 update the own shard of each bucket -> all-gather the bucket's parameters
    stage 3      parameters are gathered block by block, forward and backward (parts/unit_gathers.py);
                 after the update they stay shards

[Note: Peers that wait in backward] To start a bucket, to write to its slot or to gather a block may mean to wait until
peers have started an earlier one, and peers start it when their backward gets there. Where layers synchronise BatchNorm
those peers may be waiting in backward for this very rank, if a parameter has a gradient on some ranks only. There,
gradients that would have to wait are kept until all ranks are past their layers: to the end of the block in stage 3,
else of backward. Nor do ranks come to a block by the same signs, or at all, if only some use it: so such a layer,
before it waits, forward or backward, has its rank start all that is due of the blocks before it. All ranks then start
everything in one order.

With `Layout(data=8, shard=4)` ranks shard within groups of four and replicate across them: gathers and reduce-scatters
stay inside a group, and each shard of the gradients is then summed across the groups (parts/replica_sums.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from harness.implementation import EvaluationOutput, Implementation, Preparation, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import clip_coefficient, global_norm
from harness.parameters import LogicalParameter, MemoryCategory
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, Workload
from impls.native.parts import hierarchy, shared_memory, zero_costs, zero_dry_run
from impls.native.parts.buckets import refuse_sparse_gradients
from impls.native.parts.buffer_broadcasts import BufferBroadcasts
from impls.native.parts.direct_gradients import Place, TrainingTask
from impls.native.parts.flat_memory import copy_into
from impls.native.parts.gradient_bucket import refusal_of_late
from impls.native.parts.gradient_shards import MAX_IN_FLIGHT
from impls.native.parts.hierarchy import Hierarchical
from impls.native.parts.optimizer_state import by_parameter, state_names
from impls.native.parts.rank_model import Kinds, Passes, RankModel
from impls.native.parts.replica_sums import ReplicaSums
from impls.native.parts.sharded_bucket import ShardedBucket
from impls.native.parts.sharded_memory import ShardedMemory
from impls.native.parts.shared_memory import Transport
from impls.native.parts.synchronised_batch_norm import prepared_alone, synchronise_batch_norm
from impls.native.parts.unit_gathers import UnitGathers
from impls.native.parts.zero_plan import ZeroPlan, plan_zero


class NativeShardedOptimizer(Implementation):
    """`stage` says what is sharded. `reshard_after_forward` (stage 3) frees a block's parameters between its forward
    and its backward; without it they are gathered once a step. `transport="shared_memory"` exchanges through mapped
    memory where a shard group shares a machine, and falls back to the process group elsewhere, where `hierarchical`
    takes a group on several nodes in two levels (parts/hierarchical_exchange.py). `bucket_bytes` bounds a bucket
    (default: parts/zero_plan.py); `direct_gradients` computes weight gradients where they are reduced
    (parts/direct_gradients.py).
    """

    strategy = "zero"
    strategy_option = "stage"
    transport_option = "transport"
    whose: ClassVar[str] = "native.zero"  # in messages

    @classmethod
    def strategy_of(cls, options: Mapping[str, Any]) -> str:
        return f"zero_{options.get('stage', 1)}"

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        bucket_bytes = options.get("bucket_bytes")
        if bucket_bytes is not None and bucket_bytes < 1:
            return f"bucket_bytes must be at least 1, got {bucket_bytes}"
        stage = options.get("stage", 1)
        if "reshard_after_forward" in options and stage != 3:
            return f"reshard_after_forward is for stage 3, which alone shards parameters, got stage {stage}"
        return None

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.tensor, layout.pipeline) != (1, 1):
            return f"a sharded optimizer cuts no layer: it takes a data degree and a shard degree, got {layout}"
        return workload.fits_data_degree(layout.data)

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        plan = _plan(workload, parameters, layout, options)
        shares_memory = options.get("transport") == "shared_memory"
        return zero_costs.memory_bytes(plan, workload, parameters, layout, shares_memory=shares_memory)

    @classmethod
    def predicted_late_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int:
        plan = _plan(workload, parameters, layout, options)
        shares_memory = options.get("transport") == "shared_memory"
        return zero_costs.late_bytes(plan, workload, layout, shares_memory=shares_memory)

    @classmethod
    def dry_run_preparation(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Preparation:
        prepare = partial(
            zero_dry_run.prepare,
            plan=_plan(workload, parameters, layout, options),
            workload=workload,
            layout=layout,
            shares_memory=options.get("transport") == "shared_memory",
            direct=options.get("direct_gradients", True),
        )
        return prepared_alone(prepare) if workload.synchronise_batch_norm else prepare

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        return zero_costs.wire_bytes(_plan(workload, parameters, layout, options), workload, layout)

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        """The bytes of `predicted_wire_bytes`, from rank to rank, but for norms."""
        plan = _plan(workload, parameters, layout, options)
        return zero_costs.traffic_of(plan, workload, layout, seats, options.get("hierarchical", "auto"))

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        stage: Literal[1, 2, 3] = 1,
        reshard_after_forward: bool = True,
        transport: Transport = "process_group",
        hierarchical: Hierarchical = "auto",
        bucket_bytes: int | None = None,
        direct_gradients: bool = True,
    ) -> None:
        for name, value, choices in (
            ("stage", stage, (1, 2, 3)),
            ("transport", transport, get_args(Transport)),
            ("hierarchical", hierarchical, get_args(Hierarchical)),
        ):
            if value not in choices:
                raise ValueError(f"{self.whose}: {name} must be one of {', '.join(map(str, choices))}, got {value!r}")
        self.workload = workload
        self.device = device
        self.stage = stage
        self.transport_fallback = None
        if transport == "shared_memory":
            self.transport_fallback = shared_memory.why_not(mesh, device, axis="shard")
        self.shard_group = mesh.group("shard")
        replicas = mesh.group("replicate") if layout.data > layout.shard_degree else None
        self.hierarchical_fallback = hierarchy.fallback(hierarchical, mesh, "shard", device)
        levels_of_replicas = None
        if hierarchy.is_chosen(hierarchical, layout, mesh.seats, "replicate", device):
            levels_of_replicas = hierarchy.levels(mesh, "replicate")
            self.hierarchical_fallback = None
        self.model = self._make_model(workload, layout, mesh, device)
        self.module = self.model.module
        refuse_sparse_gradients(self.module, self.whose)
        self.parameters = dict(self.module.named_parameters())
        self._backward_synchronises = workload.synchronise_batch_norm and layout.data > 1
        self._buffers = BufferBroadcasts(self.module, mesh.group("data"))
        self.num_updates = 0

        self.plan: ZeroPlan = plan_zero(
            workload,
            self.model.parameters,
            layout,
            stage=stage,
            bucket_bytes=bucket_bytes,
            reshards=reshard_after_forward,
            kinds=self.model.kinds,
        )
        self.memory = ShardedMemory(
            self.plan,
            self.module,
            workload,
            mesh,
            transport="process_group" if self.transport_fallback else transport,
            is_hierarchical=hierarchy.is_chosen(hierarchical, layout, mesh.seats, "shard", device),
            whose=self.whose,
        )
        self.buckets: list[ShardedBucket] = self.memory.buckets
        self.levels = self.memory.levels or levels_of_replicas
        self.replicas: ReplicaSums | None = None
        if replicas is not None:
            shards = [bucket.shard_gradients for bucket in self.buckets]
            self.replicas = ReplicaSums(shards, replicas, levels_of_replicas)
        self.units: UnitGathers | None = None
        if stage == 3:
            self.units = UnitGathers(
                self.memory.placed_units(self.module),
                self.memory.gathers,
                reshards=reshard_after_forward,
                # What is in the root unit stays for the whole micro-batch.
                watches_saved=len(self.plan.modules) > 1 and not self.plan.transforms_functions,
                of_norms=self.plan.of_norms,
                done_in_backward=self._reduce_unit,
                whose=self.whose,
            )
        if workload.synchronise_batch_norm:
            on_call = {} if self.units is None else {"on_call": self.units.norm_is_called}
            synchronise_batch_norm(self.module, mesh.group("data", lane=1), **on_call)
        self.memory.remember_parameters()
        self._next_to_reduce = 0
        self._micro_batch, self._num_micro_batches = 0, 1
        self._hooks: list[RemovableHandle] = []
        for index, bucket in enumerate(self.buckets):
            for name in bucket.gradient_views:
                self._watch(index, name)
        self._training_task = TrainingTask()
        if direct_gradients:
            places = {
                name: Place(view, partial(self._claim, index, name), partial(self._is_open, index))
                for index, bucket in enumerate(self.buckets)
                for name, view in bucket.gradient_views.items()
            }
            self.model.write_directly(places, self._training_task)

    def train_step(self, batch: Batch) -> StepOutput:
        if not self.num_updates:
            self.memory.check_parameters(self.module)
        self.memory.begin_step()
        for bucket in self.buckets:
            bucket.start_step()
        self._num_micro_batches = len(batch.micro_batches)
        loss_sum, num_tokens = self.model.forward_backward(batch, self._training_task, self._passes())
        learning_rate = self.workload.training.learning_rate_at(self.num_updates)
        with phase("optimizer"):
            norm, skipped = self._step(learning_rate)
        self._buffers.broadcast()
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=norm,
            skipped=skipped,
            learning_rates=(learning_rate,),
        )

    def _passes(self) -> Passes:
        def begin_micro_batch(index: int) -> None:
            self._micro_batch, self._next_to_reduce = index, 0

        def begin_backward() -> None:
            if self.units is not None:
                self.units.begin_backward(comes_again=self._num_micro_batches > 1)

        def end_backward() -> None:
            if self.units is not None:
                self.units.end_backward()

        def reduce(is_last: bool) -> None:
            while (self.stage > 1 or is_last) and self._next_to_reduce < len(self.buckets):
                self._reduce_next()

        return Passes(
            begin_micro_batch=begin_micro_batch,
            forward=self.units.forward if self.units is not None else nullcontext,
            begin_backward=begin_backward,
            end_backward=end_backward,
            reduce=reduce,
        )

    @property
    def _exchanges(self) -> bool:
        """Whether gradients are reduced within this micro-batch's backward: where they are kept whole, only in the
        last one's."""
        return self.stage > 1 or self._micro_batch == self._num_micro_batches - 1

    @property
    def _completes_sums(self) -> bool:
        """Whether what is reduced now is the last of the step: where gradients are kept whole nothing else is."""
        return self.stage == 1 or self._micro_batch == self._num_micro_batches - 1

    def _step(self, learning_rate: float) -> tuple[Tensor | None, bool]:
        """Updates the shards, each as its sum arrives unless the recipe needs the norm over all of them first."""
        training = self.workload.training
        scale, norm = None, None
        if self.units is not None:
            self.units.forget()
        self.memory.begin_update()
        if training.checks_norm:
            for index in range(len(self.buckets)):
                self._await_sum(index)
            norm = self._global_norm()
            if training.skip_nonfinite and not bool(torch.isfinite(norm)):
                return norm, True
            if training.clip_norm is not None:
                scale = 1.0 / clip_coefficient(norm, training.clip_norm)
        for index, bucket in enumerate(self.buckets):
            if not training.checks_norm:
                self._await_sum(index)
            bucket.update(learning_rate, scale)
            self.memory.publish(index)
        self.memory.finish_update()
        if norm is None and self.tracks_gradient_norm:
            norm = self._global_norm()
        self.num_updates += 1
        return norm, False

    def _await_sum(self, index: int) -> None:
        """This rank's shard of the sum over all data ranks."""
        bucket = self.buckets[index]
        self.memory.exchange.wait(index)
        if self.replicas is not None:
            self.replicas.wait(index)
        bucket.settle()

    def _global_norm(self) -> Tensor:
        """Over all shards, padding left out; replicas hold the same shards, so they do not count again."""
        counted = [b.own_gradients for b in self.buckets if b.own_gradients.numel() and self._counts(b)]
        return self.model.norm_over_slices(self.memory.norm_over_shards(global_norm(counted)))

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        self.memory.check_parameters(self.module)
        return self.model.evaluate(batch, nullcontext if self.units is None else self.units.forward_alone)

    def full_gradients(self) -> dict[str, Tensor]:
        unused = self.memory.unused_everywhere()
        full: dict[str, Tensor] = {}
        for index, bucket in enumerate(self.buckets):
            # Each rank undoes its own scaling: one that had nothing to step has scaled nothing.
            shard = bucket.shard_gradients
            shard = shard if bucket.scale_left is None else shard * bucket.scale_left
            full |= {name: whole for name, whole in self.memory.whole(index, shard) if name not in unused}
        return self.model.whole(full)

    def full_parameters(self) -> dict[str, Tensor]:
        self.memory.check_parameters(self.module)
        return self.model.whole(self.memory.full_parameters())

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        kinds = state_names(self.workload.training)
        return by_parameter({kind: self.model.whole(self.memory.full_states(kind)) for kind in kinds})

    def full_buffers(self) -> dict[str, Tensor]:
        return self.model.whole_buffers()

    def facts(self) -> Mapping[str, str]:
        facts = {"transport": self.memory.transport, "num_buckets": str(len(self.buckets)), **self.model.facts()}
        facts |= hierarchy.facts(self.levels, self.hierarchical_fallback)
        if self.stage == 3:
            facts["num_units"] = str(len(self.plan.modules))
        if self.plan.untraced_because:
            facts["one_unit_because"] = self.plan.untraced_because
        return facts | ({"transport_fallback": self.transport_fallback} if self.transport_fallback else {})

    def replicated_tensors(self) -> Iterator[Tensor]:
        """Parameters, as the next forward would see them, and buffers."""
        if self.units is not None:
            yield from self.units.gathered()
        else:
            yield from self.module.parameters()
        yield from self.module.buffers()

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        tensors = self.memory.tensors()
        buffers = [*tensors["communication_buffers"], *self.model.communication_buffers()]
        return {**tensors, "communication_buffers": buffers}

    def close(self) -> None:
        # A parameter's hooks hold this object, and through it process groups with threads that never sleep for long;
        # Python's garbage collector does not see through parameters that torch itself refers to.
        for hook in self._hooks:
            hook.remove()
        self.memory.close()
        if self.replicas is not None:
            self.replicas.close()
        self.model.close()

    def _make_model(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> RankModel:
        """What this rank trains; a strategy that cuts the model puts its slice here."""
        return RankModel(workload, device, self.whose)

    def _watch(self, index: int, name: str) -> None:
        """After each backward moves the parameter's gradient into its bucket and starts every reduction that is due."""
        bucket = self.buckets[index]
        view = bucket.gradient_views[name]

        def gradient_is_ready(parameter: Tensor) -> None:
            if self.units is not None:
                self.units.enter_backward(self.plan.flats[index].unit)
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and not self._is_open(index):
                # Backward passes within backward (re-entrant checkpoints) announce a parameter once each.
                bucket.early[name] = gradient + bucket.early[name] if name in bucket.early else gradient
            elif gradient is not None:
                # Copied at once: the gradient is still in the cache, and its memory serves the next one.
                copy_into(view, gradient) if self._claim(index, name) else view.add_(gradient)
            if self._exchanges:
                bucket.announcements.announce(name)
                while self._is_due(self._next_to_reduce):
                    self._reduce_next()
                self.memory.exchange.progress()

        self._hooks.append(self.parameters[name].register_post_accumulate_grad_hook(gradient_is_ready))

    def _is_due(self, index: int) -> bool:
        """Whether the bucket's reduction can start within backward; see [Note: Peers that wait in backward]."""
        if (
            index == len(self.buckets)
            or not self.buckets[index].announcements.all_are_made
            or self.plan.flats[index].unit
        ):
            return False  # a block's wait until its parameters have made room
        if self._backward_synchronises:
            return self.stage < 3 and index < MAX_IN_FLIGHT and self._is_open(index)
        return True

    def _is_open(self, index: int) -> bool:
        """Whether gradients can go to their bucket: not while the one before it in the same slot is still filling, nor
        while it may be on its way to a peer that waits itself, see [Note: Peers that wait in backward]."""
        before = self.plan.flats[index].after_flat
        if self._backward_synchronises and self.stage > 1:
            return before is None and self._micro_batch == 0
        return before is None or before < self._next_to_reduce

    def _claim(self, index: int, name: str) -> bool:
        """Before every write of a gradient to its bucket: True for the first one since the last exchange."""
        bucket = self.buckets[index]
        if index < self._next_to_reduce:
            raise RuntimeError(refusal_of_late(self.whose, name))
        if not bucket.filled:
            self.memory.exchange.reclaim(index)
        is_first = name not in bucket.filled
        bucket.filled.add(name)
        return is_first

    def _reduce_unit(self, unit: int) -> None:
        """Backward is done with a block of stage 3; what has no gradient by now gets none."""
        while self._next_to_reduce < len(self.buckets) and self.plan.flats[self._next_to_reduce].unit >= unit:
            self._reduce_next()

    def _reduce_next(self) -> None:
        """Starts the reduction of the next bucket. Always in bucket order: ranks may complete theirs in others."""
        index = self._next_to_reduce
        bucket = self.buckets[index]
        self._training_task.catch_up()  # layers may owe it some of its gradients
        for name, gradient in bucket.early.items():
            view = bucket.gradient_views[name]
            copy_into(view, gradient) if self._claim(index, name) else view.add_(gradient)
        bucket.early.clear()
        self._next_to_reduce += 1
        if not bucket.filled:
            self.memory.exchange.reclaim(index)
        bucket.mark_unused()
        self.model.sum_partial(self._kinds(bucket), bucket.gradients)
        bucket.start_filling()
        then = None
        if self.replicas is not None and self._completes_sums:
            then = partial(self.replicas.start, index)
        self.memory.start_sum(index, add=self.stage > 1 and self._micro_batch > 0, then=then)

    def _kinds(self, bucket: ShardedBucket) -> Kinds:
        """Of its parameters, which are alike in that."""
        return self.model.kinds(bucket.plan.bucket.segments[0].parameter.name)

    def _counts(self, bucket: ShardedBucket) -> bool:
        return self.model.counts(self._kinds(bucket))


def _plan(
    workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
) -> ZeroPlan:
    return plan_zero(
        workload,
        parameters,
        layout,
        stage=options.get("stage", 1),
        bucket_bytes=options.get("bucket_bytes"),
        reshards=options.get("reshard_after_forward", True),
    )
