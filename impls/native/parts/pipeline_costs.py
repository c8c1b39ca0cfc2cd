"""What each rank of a pipeline holds and sends in a step, found on tensors without memory before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.chain import Border, borders, chain_of, holders_of
from harness.parameters import LogicalParameter, all_reduce_wire_bytes, logical_parameters, replicated_state_bytes
from harness.workload import Workload

_NORM_BYTES = torch.float64.itemsize


@dataclass(frozen=True, kw_only=True)
class RankCosts:
    """The `parameters` that one rank holds and the bytes that it sends in a step."""

    parameters: tuple[LogicalParameter, ...]
    sent_bytes: int


def rank_costs(workload: Workload, stages: Sequence[range], num_ranks: int) -> tuple[RankCosts, ...]:
    """Of each rank, for the first step's micro-batches:

    activations   over each border to another rank, forward; their gradients, where they have one, back
    ties          2(n-1)/n of the gradients that the stages of n ranks make together
    norm          where the recipe asks for it, an fp64 number to each of the others
    """
    chain = chain_of(workload)
    rank_of = [stage % num_ranks for stage in range(len(stages))]
    holders = holders_of(chain.model, chain.blocks, stages, rank_of)
    parameters = logical_parameters(chain.model, workload.decays)
    held = [tuple(p for p in parameters if rank in holders.get(p.name, ())) for rank in range(num_ranks)]
    sent = _message_bytes(workload, stages, num_ranks)
    for ranks in {tuple(sorted(of_one)) for of_one in holders.values() if len(of_one) > 1}:
        tied = [p for p in parameters if tuple(sorted(holders.get(p.name, ()))) == ranks]
        summed = replicated_state_bytes(tied, workload.precision, workload.training.num_moments)["gradients"]
        for rank in ranks:
            sent[rank] += all_reduce_wire_bytes(summed, len(ranks))
    norm = (num_ranks - 1) * _NORM_BYTES if workload.training.checks_norm else 0
    return tuple(RankCosts(parameters=p, sent_bytes=s + norm) for p, s in zip(held, sent, strict=True))


def _message_bytes(workload: Workload, stages: Sequence[range], num_ranks: int) -> list[int]:
    sent = [0] * num_ranks
    of_shapes: dict[tuple[int, ...], tuple[Border, ...]] = {}
    for micro_batch in workload.batch(0).micro_batches:
        shape = tuple(micro_batch.inputs.shape)
        if shape not in of_shapes:
            of_shapes[shape] = borders(workload, micro_batch.inputs)
        for stage, blocks in enumerate(stages[:-1]):
            here, there = stage % num_ranks, (stage + 1) % num_ranks
            if here != there:
                border = of_shapes[shape][blocks.stop - 1]
                sent[here] += sum(tensor.num_bytes for tensor in border)
                sent[there] += sum(tensor.num_bytes for tensor in border if tensor.carries_gradient)
    return sent
