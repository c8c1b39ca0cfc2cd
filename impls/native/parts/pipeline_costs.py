"""What each rank of a pipeline holds and sends in a step, found on tensors without memory before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from harness import traffic
from harness.chain import holders_of
from harness.layout import Layout
from harness.parameters import LogicalParameter, all_reduce_wire_bytes, replicated_state_bytes
from harness.traffic import Traffic
from harness.workload import Batch, MicroBatch, Workload
from impls.native.parts.direct_gradients import TrainingTask
from impls.native.parts.pipeline_plan import PipelinePlan
from impls.native.parts.rank_model import Kinds, Passes, RankModel

_NORM_BYTES = torch.float64.itemsize
_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class RankCosts:
    """The `parameters` that one rank holds, as they lie there, with their `kinds` by name; the bytes that it sends in a
    step, but for those along the data axis, and the most that it sends to other slices at once."""

    parameters: tuple[LogicalParameter, ...]
    kinds: Mapping[str, Kinds]
    sent_bytes: int
    largest_bytes: int = 0


def rank_costs(plan: PipelinePlan) -> tuple[RankCosts, ...] | None:
    """Of each rank, for the first step's micro-batches:

    activations   over each border to another rank, forward; their gradients, where they have one, back
    slices        what the layers of the tensor plan exchange, and once the partial gradients of what is whole
    ties          2(n-1)/n of the gradients that the stages of n ranks make together
    norm          where the recipe asks for it, an fp64 number to each of the others of an axis

    None where slices cannot be run without values.
    """
    batch = plan.largest_batch().to(_META)
    whole, _ = plan.whole()
    messages, exchanged = [0] * plan.num_ranks, [(0, 0)] * plan.num_ranks
    for (here, _), num_bytes in _message_bytes(plan, whole, batch).items():
        messages[here] += num_bytes
    if plan.tensor_degree > 1:
        try:
            exchanged = [_exchanged_bytes(plan, rank, batch) for rank in range(plan.num_ranks)]
        except (NotImplementedError, RuntimeError):  # whatever a model does with tensors that have no values
            return None
    workload = plan.workload
    norm = (plan.num_ranks - 1 + plan.tensor_degree - 1) * _NORM_BYTES if workload.training.checks_norm else 0
    assert workload.chain is not None
    rank_of = [stage % plan.num_ranks for stage in range(len(plan.stages))]
    holders = holders_of(whole.module, list(workload.chain(whole.module)), plan.stages, rank_of)
    costs = []
    for rank in range(plan.num_ranks):
        held = tuple(p for p in whole.parameters if rank in holders.get(p.name, ()))
        kinds = {p.name: (*whole.kinds(p.name), tuple(sorted(holders[p.name]))) for p in held}
        sums = _summed_bytes(workload, held, kinds, plan.tensor_degree)
        sent, largest = exchanged[rank]
        sent += messages[rank] + sums + norm
        costs.append(RankCosts(parameters=held, kinds=kinds, sent_bytes=sent, largest_bytes=largest))
    return tuple(costs)


def traffic_along(plan: PipelinePlan, costs: Sequence[RankCosts], layout: Layout) -> Traffic:
    """What the ranks of each pipeline, without slices, send to each other: messages over its borders, and the sums of
    gradients that several of its ranks make together."""
    whole, _ = plan.whole()
    messages = _message_bytes(plan, whole, plan.largest_batch().to(_META))
    training, precision = plan.workload.training, plan.workload.precision
    tied: dict[tuple[int, ...], dict[str, LogicalParameter]] = {}
    for rank in costs:
        for parameter in rank.parameters:
            holders = rank.kinds[parameter.name][-1]
            if isinstance(holders, tuple) and len(holders) > 1:
                tied.setdefault(holders, {})[parameter.name] = parameter
    parts = []
    for ranks in layout.groups("pipeline"):
        parts.append(Traffic({(ranks[here], ranks[there]): sent for (here, there), sent in messages.items()}))
        for holders, parameters in tied.items():
            states = replicated_state_bytes([*parameters.values()], precision, training.num_moments)
            parts.append(traffic.all_reduce([ranks[holder] for holder in holders], states["gradients"]))
    return traffic.total(parts)


def _message_bytes(plan: PipelinePlan, whole: RankModel, batch: Batch) -> Traffic:
    """What the ranks of the pipeline send to each other."""
    sent = Traffic()
    for micro_batch, count in _shapes(batch):
        borders = whole.borders(micro_batch.inputs)
        for stage, blocks in enumerate(plan.stages[:-1]):
            here, there = stage % plan.num_ranks, (stage + 1) % plan.num_ranks
            if here != there:
                border = borders[blocks.stop - 1]
                sent[here, there] += count * sum(tensor.num_bytes for tensor in border)
                sent[there, here] += count * sum(tensor.num_bytes for tensor in border if tensor.carries_gradient)
    return sent


def _exchanged_bytes(plan: PipelinePlan, rank: int, batch: Batch) -> tuple[int, int]:
    """What the rank sends to those with other slices of its stages, as they go forward and backward, in all and at
    most at once."""
    one_at_a_time = replace(plan, schedule=replace(plan.schedule, num_micro_batches=1))
    whole, exchange = plan.whole()
    stages = one_at_a_time.part(rank, whole)
    total = 0
    for micro_batch, count in _shapes(batch):
        before = exchange.sent_bytes
        with torch.device(_META):
            alone = replace(batch, micro_batches=(micro_batch,))
            stages.forward_backward(alone, TrainingTask(), Passes(begin_micro_batch=lambda index: None))
        total += count * (exchange.sent_bytes - before)
    return total, exchange.largest_bytes


def _shapes(batch: Batch) -> Iterable[tuple[MicroBatch, int]]:
    """A micro-batch of each shape, and how many there are."""
    alike: dict[tuple[int, ...], list[MicroBatch]] = {}
    for micro_batch in batch.micro_batches:
        alike.setdefault(tuple(micro_batch.inputs.shape), []).append(micro_batch)
    return [(first, 1 + len(others)) for first, *others in alike.values()]


def _summed_bytes(
    workload: Workload, parameters: Iterable[LogicalParameter], kinds: Mapping[str, Kinds], tensor_degree: int
) -> int:
    """For the gradients that are partial on a rank, along the tensor axis or along the pipeline."""
    of_kinds: dict[Kinds, list[LogicalParameter]] = {}
    for parameter in parameters:
        of_kinds.setdefault(kinds[parameter.name], []).append(parameter)
    total = 0
    for (*of_slice, holders), alike in of_kinds.items():
        gradients = replicated_state_bytes(alike, workload.precision, workload.training.num_moments)["gradients"]
        total += all_reduce_wire_bytes(gradients, tensor_degree if of_slice == ["partial"] else 1)
        total += all_reduce_wire_bytes(gradients, len(holders) if isinstance(holders, tuple) else 1)
    return total
