"""Micro-batches forward through the stages of a pipeline, and not back.

Torch's own `eval` of a schedule carries out the backwards too, as empty actions, which fails where two stages that
follow each other lie on one rank (zero-bubble's V); and it takes the schedule's own number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.chain import Border

Forward = Callable[[int, Sequence[Tensor]], list[Tensor]]
"""(micro-batch, what the stage before has handed on): what a stage hands on."""


def forward_through(
    stages: Mapping[int, Forward],
    rank_of: Sequence[int],
    handed: Sequence[Sequence[Border]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """`stages` are this rank's, `rank_of` says where each of all of them is, and `handed` what each hands on with each
    micro-batch. Collective over `group`."""
    num_micro_batches = len(handed[0])
    # Stage s comes to micro-batch m at clock s + m: nobody waits for what comes later.
    order = sorted((stage + index, stage, index) for stage in stages for index in range(num_micro_batches))
    local: dict[tuple[int, int], list[Tensor]] = {}
    sends: list[tuple[Any, Tensor]] = []
    for _, stage, index in order:
        inputs: list[Tensor] = []
        if stage and stage - 1 in stages:
            inputs = local.pop((stage - 1, index))
        elif stage:
            inputs = [torch.empty(shape.shape, dtype=shape.dtype, device=device) for shape in handed[stage - 1][index]]
            for tensor in filter(Tensor.numel, inputs):
                dist.recv(tensor, group=group, group_src=rank_of[stage - 1])
        outputs = stages[stage](index, inputs)
        if stage + 1 in stages:
            local[stage, index] = outputs
        elif stage + 1 < len(rank_of):
            next_rank, sent = rank_of[stage + 1], filter(Tensor.numel, outputs)
            sends += [(dist.isend(tensor, group=group, group_dst=next_rank), tensor) for tensor in sent]
    for work, _ in sends:
        work.wait()
