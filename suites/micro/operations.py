"""Operations of several ranks: each is an implementation whose step is one collective, so that the harness' own ranks
time it, every rank for itself, as they time training.

What an operation yields is checked while it is built: a wrong sum is fast easily.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from harness.implementation import Implementation, StepOutput
from harness.layout import Layout
from harness.mesh import Mesh
from harness.workload import Batch, Workload
from impls.native.parts import hierarchy
from impls.native.parts.collectives import parameter_server_all_reduce, ring_all_reduce
from impls.native.parts.direct_gradients import TrainingTask
from impls.native.parts.gradient_shards import Flat, GradientShards, ProcessGroupShards
from impls.native.parts.parameter_gathers import ParameterGathers, ProcessGroupGathers
from impls.native.parts.shared_gradients import SharedMemoryShards
from impls.native.parts.shared_memory import SharedBuffers
from impls.native.parts.shared_parameters import SharedMemoryGathers
from impls.native.parts.tensor_exchange import ProcessGroupExchange, SharedMemoryExchange, TensorExchange
from impls.native.parts.tensor_layers import TensorContext
from impls.native.parts.tensor_vocabulary import cross_entropy_sum

VOCABULARY_SIZE, NUM_TOKENS = 8192, 512
_CPU = torch.device("cpu")
_TIMEOUT_SECONDS = 60.0

Run = Callable[[], None]


class Operation(Implementation):
    """The operation `name` by `means`, on buffers of `num_bytes` where it has any."""

    strategy = "none"

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        name: str,
        means: str,
        num_bytes: int = 0,
    ) -> None:
        self.module = nn.Identity()
        if means == "two_levels":
            self._run, self._close = _all_reduce_in_two_levels(mesh, num_bytes // 4), _nothing
            return
        make = {
            "all_reduce": _all_reduce,
            "reduce_scatter": _reduce_scatter,
            "all_gather": _all_gather,
            "cross_entropy": _cross_entropy,
        }[name]
        group = mesh.group("tensor" if name == "cross_entropy" else "data")
        self._run, self._close = make(group, means, num_bytes // 4)

    def train_step(self, batch: Batch) -> StepOutput:
        self._run()
        return StepOutput(loss_sum=None, num_tokens=0, gradient_norm=None, skipped=False, learning_rates=())

    def full_gradients(self) -> dict[str, Tensor]:
        return {}

    def full_parameters(self) -> dict[str, Tensor]:
        return {}

    def close(self) -> None:
        self._close()


def _all_reduce(group: dist.ProcessGroup, means: str, num_elements: int) -> tuple[Run, Run]:
    """Each rank's buffer of `num_elements` becomes their sum; over shared memory it is left for all to read."""
    if means == "shared_memory":
        shared = SharedBuffers([(num_elements, torch.float32)], group, timeout_seconds=_TIMEOUT_SECONDS)

        def sum_shared() -> None:
            shared.reclaim(0)
            shared.publish(0)
            shared.wait(0)
            shared.release(0)

        shared.own(0).fill_(group.rank() + 1.0)
        shared.publish(0)
        shared.wait(0)
        _check(torch.cat([total for _, _, total in shared.sums(0)]), _total(group))
        shared.release(0)
        shared.reclaim(0)
        shared.own(0).zero_()
        return sum_shared, shared.close
    by = {
        "backend": lambda buffer, group: dist.all_reduce(buffer, group=group),
        "ring": ring_all_reduce,
        "parameter_server": parameter_server_all_reduce,
    }[means]
    buffer = torch.full((num_elements,), group.rank() + 1.0)
    by(buffer, group)
    _check(buffer, _total(group))
    buffer.zero_()
    return lambda: by(buffer, group), _nothing


def _all_reduce_in_two_levels(mesh: Mesh, num_elements: int) -> Run:
    """As _all_reduce, over ranks of several nodes."""
    group, levels = mesh.group("data"), hierarchy.levels(mesh, "data")
    buffer = torch.full((num_elements,), group.rank() + 1.0)
    hierarchy.all_reduce(buffer, levels)
    _check(buffer, _total(group))
    buffer.zero_()
    return lambda: hierarchy.all_reduce(buffer, levels)


def _reduce_scatter(group: dist.ProcessGroup, means: str, num_elements: int) -> tuple[Run, Run]:
    """Of buffers of `num_elements` each rank gets the sum of its shard."""
    into = torch.zeros(num_elements // group.size())
    if means == "backend":
        full = torch.full((num_elements,), group.rank() + 1.0)

        def scatter() -> None:
            dist.reduce_scatter_single(into, full, group=group)

        scatter()
        _check(into, _total(group))
        return scatter, _nothing
    flats = [Flat(num_shard_elements=len(into), dtype=torch.float32, slot=0)]
    shards: GradientShards = (
        ProcessGroupShards(flats, group, _CPU)
        if means == "process_group"
        else SharedMemoryShards(flats, group, timeout_seconds=_TIMEOUT_SECONDS)
    )

    def scatter_natively() -> None:
        shards.reclaim(0)
        shards.start(0, into, add=False)
        shards.wait(0)

    shards.reclaim(0)
    shards.own(0).fill_(group.rank() + 1.0)
    scatter_natively()
    _check(into, _total(group))
    return scatter_natively, shards.close


def _all_gather(group: dist.ProcessGroup, means: str, num_elements: int) -> tuple[Run, Run]:
    """Each rank's shard becomes part of everyone's `num_elements`."""
    num_shard_elements = num_elements // group.size()
    if means == "backend":
        full, shard = torch.zeros(num_elements), torch.full((num_shard_elements,), group.rank() + 1.0)

        def gather() -> None:
            dist.all_gather_single(full, shard, group=group)

        gather()
        _check(full.view(group.size(), -1)[:, -1], torch.arange(1.0, group.size() + 1))
        return gather, _nothing
    flats = [Flat(num_shard_elements=num_shard_elements, dtype=torch.float32, slot=0)]
    gathers: ParameterGathers = (
        ProcessGroupGathers(flats, group, _CPU, keeps_full=True)
        if means == "process_group"
        else SharedMemoryGathers(flats, group, timeout_seconds=_TIMEOUT_SECONDS)
    )

    def gather_natively() -> None:
        gathers.publish(0)
        gathers.start(0)
        gathers.wait(0)

    gathers.shard(0).fill_(group.rank() + 1.0)
    gather_natively()
    _check(gathers.full(0).view(group.size(), -1)[:, -1], torch.arange(1.0, group.size() + 1))
    dist.barrier(group=group)
    return gather_natively, gathers.close


def _cross_entropy(group: dist.ProcessGroup, means: str, _num_elements: int) -> tuple[Run, Run]:
    """Forward and backward of the summed cross-entropy of NUM_TOKENS over a vocabulary that the ranks share out."""
    generator = torch.Generator().manual_seed(0)
    everything = torch.randn(NUM_TOKENS, VOCABULARY_SIZE, generator=generator)
    targets = torch.randint(VOCABULARY_SIZE, (NUM_TOKENS,), generator=generator)
    size = VOCABULARY_SIZE // group.size()
    first = group.rank() * size
    logits = everything[:, first : first + size].clone().requires_grad_()
    if means == "whole":
        exchange: TensorExchange | None = None
    elif means == "process_group":
        exchange = ProcessGroupExchange(group)
    else:
        exchange = SharedMemoryExchange(group, timeout_seconds=_TIMEOUT_SECONDS)
    context = None if exchange is None else TensorContext(exchange=exchange, task=TrainingTask())

    def loss() -> Tensor:
        if context is None:
            return cross_entropy(logits, targets, reduction="sum")
        return cross_entropy_sum(logits, targets, first, context)

    def train() -> None:
        logits.grad = None
        loss().backward()

    _check(loss().detach(), cross_entropy(everything, targets, reduction="sum"))
    return train, _nothing if exchange is None else exchange.close


def _total(group: dist.ProcessGroup) -> float:
    """The sum over all ranks, where each brought its number, from 1 on."""
    return group.size() * (group.size() + 1) / 2


def _check(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype).expand_as(found))


def _nothing() -> None:
    pass
