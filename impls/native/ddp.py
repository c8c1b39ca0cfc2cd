"""Data parallel: every rank holds the whole model and a slice of the batch; gradients are summed between ranks while
backward still runs (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training").

    backward   | block 3 | block 2 | block 1 |           parameters live in flat buckets, in reverse order of use;
    reduction            | bucket 0 | bucket 1 |         a bucket's sum starts when its last gradient is there, in the
    update                       | bucket 0 | bucket 1   same order on every rank, and its update when the sum has come
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from harness import traffic
from harness.implementation import EvaluationOutput, Implementation, Preparation, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import clip_coefficient, global_norm
from harness.parameters import (
    LogicalParameter,
    MemoryCategory,
    all_reduce_wire_bytes,
    broadcast_wire_bytes,
    replicated_state_bytes,
)
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, Workload
from impls.native.parts import hierarchy, shared_memory
from impls.native.parts.bucket_sums import BucketSums, OwnShares, Piece, ProcessGroupSums, SharedMemorySums
from impls.native.parts.buckets import BucketPlan, plan_buckets, refuse_sparse_gradients
from impls.native.parts.buffer_broadcasts import BufferBroadcasts
from impls.native.parts.collectives import parameter_server_all_reduce, ring_all_reduce
from impls.native.parts.direct_gradients import Place, TrainingTask, prepare_dry_run
from impls.native.parts.flat_memory import copy_into
from impls.native.parts.gradient_bucket import GradientBucket, refusal_of_late
from impls.native.parts.hierarchy import Hierarchical
from impls.native.parts.optimizer_state import by_parameter, state_names
from impls.native.parts.order_of_use import in_order_of_use
from impls.native.parts.rank_model import Kinds, Passes, RankModel
from impls.native.parts.replica_costs import replica_traffic
from impls.native.parts.shared_memory import Transport
from impls.native.parts.synchronised_batch_norm import prepared_alone, summed_bytes, synchronise_batch_norm

DEFAULT_BUCKET_BYTES = 25 << 20
DEFAULT_SMALL_BYTES = 128 << 10
Reduction = Literal["all_reduce", "ring", "parameter_server", "none"]


class NativeDataParallel(Implementation):
    """`reduction` says how gradients are summed over the process group (see parts/collectives.py), or "none": no
    training then, but the floor under this very code; `hierarchical` takes reduction=all_reduce in two levels
    (parts/hierarchy.py), "auto" where several nodes have several ranks each.
    `transport="shared_memory"` sums them through mapped memory where all ranks, or in two levels those of each node,
    share a machine, and falls back to the process group elsewhere (`transport` tells which it is). `bucket_bytes`
    bounds a bucket; gradients of fewer than `small_bytes` come to it together (parts/gradient_bucket.py);
    `direct_gradients` computes larger weight gradients where they are reduced (parts/direct_gradients.py).
    """

    strategy = "data_parallel"
    transport_option = "transport"
    whose: ClassVar[str] = "native.ddp"  # in messages

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.tensor, layout.pipeline) != (1, 1) or layout.shard not in (None, 1):
            return f"data parallel replicates the whole model: it takes only a data degree, got {layout}"
        return workload.fits_data_degree(layout.data)

    @classmethod
    def is_floor(cls, options: Mapping[str, Any]) -> bool:
        return options.get("reduction") == "none"

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        if options.get("reduction") == "none" and options.get("transport") == "shared_memory":
            return "reduction=none sums nothing, got transport=shared_memory to sum it through"
        if options.get("hierarchical") == "on" and options.get("reduction", "all_reduce") != "all_reduce":
            return f"hierarchical=on is a way of reduction=all_reduce, got reduction={options['reduction']}"
        for name, least in (("bucket_bytes", 1), ("small_bytes", 0)):
            if options.get(name, least) < least:
                return f"{name} must be at least {least}, got {options[name]}"
        return None

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)

    @classmethod
    def dry_run_preparation(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Preparation:
        prepare = super().dry_run_preparation(workload, parameters, layout, options)
        if options.get("direct_gradients", True):
            prepare = partial(prepare_dry_run, least_bytes=options.get("small_bytes", DEFAULT_SMALL_BYTES))
        return prepared_alone(prepare) if workload.synchronise_batch_norm else prepare

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        """2(n-1)/n of the gradient bytes for a ring, (n-1) times them for the parameter server itself; then what the
        first rank sends of its buffers, and the sums of synchronised BatchNorm."""
        ranks = layout.data
        gradients = replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)["gradients"]
        summed, served = gradients, 0
        if options.get("reduction") == "parameter_server" and options.get("transport") != "shared_memory":
            summed, served = 0, (ranks - 1) * gradients
        if workload.synchronise_batch_norm:
            summed += workload.training.num_micro_batches * summed_bytes(workload, layout.data)
        return all_reduce_wire_bytes(summed, ranks) + served + broadcast_wire_bytes(workload.buffer_bytes(), ranks)

    @classmethod
    def beyond_the_textbook(cls, device: torch.device, options: Mapping[str, Any]) -> str | None:
        if options.get("reduction") != "parameter_server" or options.get("transport") == "shared_memory":
            return None
        return "the first rank sends every other one the whole sum"

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        """The bytes of `predicted_wire_bytes`, from rank to rank."""
        gradients = replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)["gradients"]
        reduction = options.get("reduction", "all_reduce")
        if reduction == "all_reduce":
            hierarchical = options.get("hierarchical", "auto")
            return replica_traffic(gradients, workload, layout, seats, hierarchical)
        server, *clients = layout.groups("data")[0]
        summed = traffic.all_reduce((server, *clients), gradients)
        if reduction == "parameter_server" and options.get("transport") != "shared_memory":
            summed = Traffic({pair: gradients for peer in clients for pair in ((peer, server), (server, peer))})
        return traffic.total((summed, replica_traffic(0, workload, layout, seats, "off")))

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        reduction: Reduction = "all_reduce",
        transport: Transport = "process_group",
        hierarchical: Hierarchical = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        small_bytes: int = DEFAULT_SMALL_BYTES,
        direct_gradients: bool = True,
    ) -> None:
        for name, value, choices in (
            ("reduction", reduction, get_args(Reduction)),
            ("transport", transport, get_args(Transport)),
            ("hierarchical", hierarchical, get_args(Hierarchical)),
        ):
            if value not in choices:
                raise ValueError(f"{self.whose}: {name} must be one of {', '.join(choices)}, got {value!r}")
        given = {"reduction": reduction, "transport": transport, "hierarchical": hierarchical}
        if reason := self.refused_options(given | {"bucket_bytes": bucket_bytes, "small_bytes": small_bytes}):
            raise ValueError(f"{self.whose}: {reason}")
        self.workload = workload
        self.device = device
        self.hierarchical_fallback = hierarchy.fallback(hierarchical, mesh, "data", device)
        self.levels = None
        if reduction == "all_reduce" and hierarchy.is_chosen(hierarchical, layout, mesh.seats, "data", device):
            self.levels = hierarchy.levels(mesh, "data")
        self.transport_fallback = None
        if transport == "shared_memory":
            self.transport_fallback = shared_memory.why_not(mesh, device, inside_nodes=self.levels is not None)
        self.transport = "process_group" if self.transport_fallback else transport
        self.group = mesh.group("data")
        self.model = self._make_model(workload, layout, mesh, device)
        self.module = self.model.module
        refuse_sparse_gradients(self.module, self.whose)
        self.parameters = dict(self.module.named_parameters())
        self.buffers = BufferBroadcasts(self.module, self.group)
        # Not with sums that are sent and received on another thread: one group takes one order of operations.
        self._buffers_go_along = self.transport == "shared_memory" or reduction in ("all_reduce", "none")
        self.num_updates = 0

        plans = bucket_plans(workload, self.model.parameters, layout.data, self.model.kinds, bucket_bytes)
        if workload.synchronise_batch_norm:
            synchronise_batch_norm(self.module, mesh.group("data", lane=1))
        self.sums = self._make_sums(plans, mesh, device, reduction)
        self.buckets = [
            GradientBucket(plan, self.parameters, self.sums.own(index), workload, device, small_bytes=small_bytes)
            for index, plan in enumerate(plans)
        ]
        self._hooks: list[RemovableHandle] = []
        self._next_to_reduce = 0
        self._is_last_micro_batch = False
        for index, bucket in enumerate(self.buckets):
            is_last = index == len(self.buckets) - 1
            for name in bucket.parameters:
                # Of the last bucket all is there when backward ends: nobody needs to look out for the small ones.
                if not (is_last and name in bucket.small):
                    self._watch(index, name)
        self._training_task = TrainingTask()
        places = {
            name: Place(view, partial(self._claim, index, name))
            for index, bucket in enumerate(self.buckets)
            for name, view in bucket.gradient_views.items()
            if name not in bucket.small
        }
        if direct_gradients and places:
            self.model.write_directly(places, self._training_task)

    def train_step(self, batch: Batch) -> StepOutput:
        self._next_to_reduce = 0
        if not self.num_updates:
            self._check_parameters()
        for bucket in self.buckets:
            bucket.start_step()

        def begin_micro_batch(index: int) -> None:
            self._is_last_micro_batch = index == len(batch.micro_batches) - 1

        def end_backward() -> None:
            for bucket_index in range(self._next_to_reduce, len(self.buckets)):
                self._gather(bucket_index)

        passes = Passes(begin_micro_batch=begin_micro_batch, end_backward=end_backward)
        loss_sum, num_tokens = self.model.forward_backward(batch, self._training_task, passes)
        with phase("reduce"):
            while self._next_to_reduce < len(self.buckets):
                self._reduce_next()
            if self._buffers_go_along:
                self.buffers.start()
        learning_rate = self.workload.training.learning_rate_at(self.num_updates)
        with phase("optimizer"):
            norm, skipped = self._step(learning_rate)
        self.buffers.finish() if self._buffers_go_along else self.buffers.broadcast()
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=norm,
            skipped=skipped,
            learning_rates=(learning_rate,),
        )

    def _step(self, learning_rate: float) -> tuple[Tensor | None, bool]:
        """Steps each bucket as its sum arrives, unless the recipe needs the norm over all of them first."""
        if self.workload.training.checks_norm:
            return self._step_after_norm(learning_rate)
        squares = []
        for index, bucket in enumerate(self.buckets):
            bucket.take(self.sums.wait(index))
            bucket.update(learning_rate)
            if self.tracks_gradient_norm and self._counts(bucket):
                squares += [piece.values for piece in bucket.pieces if piece.values.numel()]
        norm = self.model.norm_over_slices(global_norm(squares)) if self.tracks_gradient_norm else None
        for index in range(len(self.buckets)):
            self.sums.release(index)
        self.num_updates += 1
        return norm, False

    def _step_after_norm(self, learning_rate: float) -> tuple[Tensor, bool]:
        """Clips by the global norm, or skips the update on all ranks alike where it is not finite."""
        training = self.workload.training
        for index, bucket in enumerate(self.buckets):
            bucket.take(self.sums.wait(index))
            self.sums.collect(index)
            bucket.pieces = [Piece(0, bucket.gradients.numel(), bucket.gradients)]
        counted = [b.gradients for b in self.buckets if b.gradients.numel() and self._counts(b)]
        norm = self.model.norm_over_slices(global_norm(counted))
        if training.skip_nonfinite and not bool(torch.isfinite(norm)):
            return norm, True
        scale = None if training.clip_norm is None else 1.0 / clip_coefficient(norm, training.clip_norm)
        for index, bucket in enumerate(self.buckets):
            self.sums.reclaim(index)  # the update scales the gradients in place: peers must have read theirs
            bucket.update(learning_rate, scale)
        self.num_updates += 1
        return norm, False

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        self._check_parameters()
        return self.model.evaluate(batch)

    def full_gradients(self) -> dict[str, Tensor]:
        full: dict[str, Tensor] = {}
        for index, bucket in enumerate(self.buckets):
            if not self.workload.training.checks_norm:
                self.sums.collect(index)
            full.update(bucket.whole_gradients())
        dist.barrier(group=self.group)  # nobody writes new gradients while another still reads these
        return self.model.whole(full)

    def full_parameters(self) -> dict[str, Tensor]:
        self._check_parameters()
        full = {name: parameter.detach().cpu().clone() for name, parameter in self.parameters.items()}
        for bucket in self.buckets:
            full.update(bucket.whole(bucket.optimizer.master))
        return self.model.whole(full)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        states = [bucket.optimizer.flat_states() for bucket in self.buckets]
        return by_parameter(
            {
                kind: self.model.whole(
                    {
                        name: value
                        for bucket, of_bucket in zip(self.buckets, states, strict=True)
                        for name, value in bucket.whole(of_bucket[kind])
                    }
                )
                for kind in state_names(self.workload.training)
            }
        )

    def full_buffers(self) -> dict[str, Tensor]:
        return self.model.whole_buffers()

    def facts(self) -> Mapping[str, str]:
        facts = {"transport": self.transport, "num_buckets": str(len(self.buckets)), **self.model.facts()}
        facts |= hierarchy.facts(self.levels, self.hierarchical_fallback)
        return facts | ({"transport_fallback": self.transport_fallback} if self.transport_fallback else {})

    def replicated_tensors(self) -> Iterable[Tensor]:
        yield from self.module.parameters()
        yield from self.module.buffers()
        for bucket in self.buckets:
            yield from bucket.optimizer.state_tensors()

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": [bucket.gradients for bucket in self.buckets],
            "optimizer_states": [tensor for bucket in self.buckets for tensor in bucket.optimizer.state_tensors()],
            "communication_buffers": self.model.communication_buffers(),
        }

    def close(self) -> None:
        # A parameter's hooks hold this object, and through it process groups with threads that never sleep for long;
        # Python's garbage collector does not see through parameters that torch itself refers to.
        for hook in self._hooks:
            hook.remove()
        self.sums.close()
        self.model.close()

    def _make_model(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> RankModel:
        """What this rank trains; a strategy that cuts the model puts its slice here."""
        return RankModel(workload, device, self.whose)

    def _make_sums(
        self, plans: Sequence[BucketPlan], mesh: Mesh, device: torch.device, reduction: Reduction
    ) -> BucketSums:
        precision = self.workload.precision
        shapes = [(plan.num_elements, precision.gradient if precision.master else plan.dtype) for plan in plans]
        if self.transport == "shared_memory":
            return SharedMemorySums(
                shared_memory.SharedBuffers(
                    shapes,
                    self.levels.inside if self.levels else self.group,
                    timeout_seconds=shared_memory.TIMEOUT_SECONDS,
                    observer=mesh.observer,
                    across=self.levels.across if self.levels else None,
                )
            )
        if reduction == "none" or self.group.size() == 1:
            return OwnShares(shapes, self.group, device)
        composed: Callable[[Tensor], None] | None = None
        if self.levels is not None:
            composed = partial(hierarchy.all_reduce, levels=self.levels)
        elif reduction != "all_reduce":
            by_name = {"ring": ring_all_reduce, "parameter_server": parameter_server_all_reduce}
            composed = partial(by_name[reduction], group=self.group)
        return ProcessGroupSums(shapes, self.group, device, composed)

    def _check_parameters(self) -> None:
        """A parameter put in the place of one taken over would train on its own, or not at all, in silence."""
        current = dict(self.module.named_parameters())
        for bucket in self.buckets:
            if (name := bucket.replaced(current)) is not None:
                raise RuntimeError(
                    f"parameter {name} was replaced after {self.whose} took it over: it is no longer the tensor that "
                    f"is reduced and stepped"
                )

    def _watch(self, index: int, name: str) -> None:
        """After each backward moves the parameter's gradient into its bucket, unless it is a small one, and in the last
        micro-batch starts every sum that is due."""
        bucket = self.buckets[index]
        view = bucket.gradient_views[name]
        is_small = name in bucket.small

        def gradient_is_ready(parameter: Tensor) -> None:
            if parameter.grad is not None and is_small:
                self._refuse_late(index, name)
            elif parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                # Copied at once: the gradient is still in the cache, and its memory serves the next one.
                copy_into(view, gradient) if self._claim(index, name) else view.add_(gradient)
            if self._is_last_micro_batch:
                bucket.announcements.announce(name)
                while self._is_due(self._next_to_reduce):
                    self._reduce_next()
                self.sums.progress()

        self._hooks.append(self.parameters[name].register_post_accumulate_grad_hook(gradient_is_ready))

    def _is_due(self, index: int) -> bool:
        return index < len(self.buckets) and self.buckets[index].announcements.all_are_made

    def _claim(self, index: int, name: str) -> bool:
        """Before every write of a large gradient to its bucket: True for the first one of this step."""
        self._refuse_late(index, name)
        bucket = self.buckets[index]
        if not bucket.filled:
            self.sums.reclaim(index)
        is_first = name not in bucket.filled
        bucket.filled.add(name)
        return is_first

    def _refuse_late(self, index: int, name: str) -> None:
        if index < self._next_to_reduce:
            raise RuntimeError(refusal_of_late(self.whose, name))

    def _gather(self, index: int) -> None:
        bucket = self.buckets[index]
        if not bucket.filled:
            self.sums.reclaim(index)
        bucket.gather()

    def _reduce_next(self) -> None:
        """Starts the sum of the next bucket. Always in bucket order: ranks may complete theirs in different orders."""
        index = self._next_to_reduce
        self._training_task.catch_up()  # layers may owe it some of its gradients
        self._next_to_reduce += 1
        self._gather(index)
        bucket = self.buckets[index]
        bucket.mark_unused()
        self.model.sum_partial(self._kinds(bucket), bucket.gradients)
        self.sums.start(index)

    def _kinds(self, bucket: GradientBucket) -> Kinds:
        """Of its parameters, which are alike in that."""
        return self.model.kinds(next(iter(bucket.parameters)))

    def _counts(self, bucket: GradientBucket) -> bool:
        return self.model.counts(self._kinds(bucket))


def bucket_plans(
    workload: Workload,
    parameters: Sequence[LogicalParameter],
    data_degree: int,
    kinds: Callable[[str], Kinds],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> tuple[BucketPlan, ...]:
    """Of what a rank holds, in the order in which backward completes them."""
    used = in_order_of_use(workload, data_degree, [parameter for parameter in parameters if parameter.trainable])
    return plan_buckets(used[::-1], bucket_bytes, kinds)
