"""torch's pipeline schedules: which class a name stands for, what it takes, and on which rank its stages are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
_ONE_STAGE = ("gpipe", "1f1b")


def refused(schedule: ScheduleName, chunks: int) -> str | None:
    """Why the schedule takes no such number of stages a rank, or None."""
    if chunks < 1:
        return f"chunks must be at least 1, got {chunks}"
    if schedule in _ONE_STAGE and chunks > 1:
        return f"{schedule} takes one stage a rank, got chunks {chunks}"
    return None


def why_not(schedule: ScheduleName, num_ranks: int, num_micro_batches: int, chunks: int) -> str | None:
    """Why torch's schedule takes no such number of micro-batches, or None."""
    if schedule == "1f1b" and num_micro_batches < num_ranks:
        return f"torch's 1F1B takes as many micro-batches as stages, got {num_micro_batches} for {num_ranks}"
    num_rounds = max(1, num_micro_batches // num_ranks)
    if schedule not in _ONE_STAGE and not is_v_shaped(schedule, chunks) and num_micro_batches % num_rounds:
        return (
            f"torch's {schedule} takes rounds of equally many micro-batches, got {num_micro_batches} in "
            f"{num_rounds} rounds of at least {num_ranks}"
        )
    return None


def is_v_shaped(schedule: ScheduleName, chunks: int) -> bool:
    """Whether a rank holds a stage and its mirror image: two stages a rank of a zero-bubble schedule.

    rank 0    stage 0                       stage 5
    rank 1             stage 1         stage 4
    rank 2                  stage 2 stage 3
    """
    return schedule == "zero_bubble" and chunks == 2


def ranks_of_stages(schedule: ScheduleName, num_ranks: int, chunks: int) -> list[int]:
    """The rank of each stage."""
    ranks = list(range(num_ranks))
    return ranks + ranks[::-1] if is_v_shaped(schedule, chunks) else ranks * chunks


def make(
    name: ScheduleName, stages: Sequence[PipelineStage], num_micro_batches: int, loss: Callable[..., Tensor]
) -> _PipelineSchedule:
    """Gradients are not divided by the number of micro-batches: `loss` is a share of the global mean."""
    kind = _class_of(name, len(stages))
    schedule: _PipelineSchedule = kind(
        stages[0] if name in _ONE_STAGE else list(stages), num_micro_batches, loss_fn=loss, scale_grads=False
    )
    return schedule


def _class_of(name: ScheduleName, chunks: int) -> type[Any]:
    from torch.distributed import pipelining  # brings FSDP and torch.export along: only ranks pay for it

    if is_v_shaped(name, chunks):
        return pipelining.ScheduleZBVZeroBubble
    return {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
        "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    }[name]
