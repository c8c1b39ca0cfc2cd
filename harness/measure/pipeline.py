"""What ranks of a pipeline did and waited for, from the marks of their actions (harness.pipeline_marks).

[Note: Two clocks] By the clock on the wall a rank waits whenever it computes no action between the first action's begin
and the last one's end anywhere in its pipeline: for messages, and where ranks share processors for those, too. By the
schedule's own clock each action takes the processor time it took, a message none, and each rank has a processor:

    measured      | 0F0 |(other ranks)| 0F1 |....| 0B0 |      2 ranks, 1 processor
    replayed      | 0F0 | 0F1 |....| 0B0 |

What remains of waiting is the schedule's and the stages': it stands beside theory, whose stages are alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median

import torch

from harness.measure.communication_recorder import Mark, now
from harness.pipeline_marks import Action, observed_by


@dataclass(frozen=True, kw_only=True)
class RecordedAction:
    """`begin` and `end` are seconds on `time.perf_counter`, which processes of one machine share. `cpu_seconds` is the
    processor time of the one thread that a rank computes with (autograd goes backward on it, too), on a GPU the time of
    the device itself. `in_flight` is of how many micro-batches its stage held activations when it ended."""

    action: str
    begin: float
    end: float
    cpu_seconds: float
    in_flight: int


Step = Sequence[RecordedAction]
"""What one rank did in one step, in order."""


class PipelineRecorder:
    """Records what one rank does; nobody times these steps:

    with recorder.step():
        implementation.train_step(batch)
    """

    def __init__(self, device: torch.device) -> None:
        self.steps: list[Step] = []
        self._device = device
        self._seen: list[tuple[str, Mark, Mark, float, int]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        origin, started = time.perf_counter(), now(self._device)
        with observed_by(self):
            yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

        def seconds(mark: Mark) -> float:
            if isinstance(mark, float):
                return mark
            assert not isinstance(started, float)
            return origin + float(started.elapsed_time(mark)) / 1e3

        seen, self._seen = self._seen, []
        self.steps.append(
            [
                RecordedAction(
                    action=action,
                    begin=seconds(begin),
                    end=seconds(end),
                    cpu_seconds=cpu_seconds if isinstance(begin, float) else seconds(end) - seconds(begin),
                    in_flight=in_flight,
                )
                for action, begin, end, cpu_seconds, in_flight in seen
            ]
        )

    @contextmanager
    def computing(self, action: str, in_flight: Callable[[], int]) -> Iterator[None]:
        begin, cpu_begin = now(self._device), time.thread_time()
        yield
        cpu_seconds, end = time.thread_time() - cpu_begin, now(self._device)
        self._seen.append((action, begin, end, cpu_seconds, in_flight()))


@dataclass(frozen=True, kw_only=True)
class PipelineFigures:
    """Of each rank the parts of a step in which it waits, by [Note: Two clocks], medians over steps; of each stage the
    most micro-batches of which it held activations at a time."""

    bubble_ratios: tuple[float, ...]
    replayed_bubble_ratios: tuple[float, ...]
    in_flight: tuple[int, ...]

    def metrics(self) -> dict[str, float]:
        """Means over ranks, and the stage that holds most."""
        return {
            "pipeline.bubble_ratio": fmean(self.bubble_ratios),
            "pipeline.replayed_bubble_ratio": fmean(self.replayed_bubble_ratios),
            "pipeline.in_flight_micro_batches": float(max(self.in_flight)),
        }


def summarise(steps: Sequence[Sequence[Step]], pipelines: Sequence[Sequence[int]]) -> PipelineFigures | None:
    """The figures of `steps[rank][step]`, where `pipelines` are the ranks of each pipeline; None where no rank marks
    its actions. ValueError where some do not, or where not every step has the same actions."""
    silent = [rank for rank, of_rank in enumerate(steps) if not of_rank or not all(of_rank)]
    if len(silent) == len(steps):
        return None
    if silent:
        raise ValueError(
            f"pipeline: expected actions in every step of each of {len(steps)} ranks, got none on rank "
            f"{', '.join(map(str, silent))}"
        )
    measured: dict[int, float] = {}
    replayed: dict[int, float] = {}
    for ranks in pipelines:
        of_pipeline = [steps[rank] for rank in ranks]
        measured |= zip(ranks, _bubbles(of_pipeline), strict=True)
        replayed |= zip(ranks, replayed_bubbles([_own_seconds(of_rank) for of_rank in of_pipeline]), strict=True)
    most: dict[int, int] = {}
    for recorded in (recorded for of_rank in steps for step in of_rank for recorded in step):
        stage = Action.parse(recorded.action).stage
        most[stage] = max(recorded.in_flight, most.get(stage, 0))
    return PipelineFigures(
        bubble_ratios=tuple(measured[rank] for rank in sorted(measured)),
        replayed_bubble_ratios=tuple(replayed[rank] for rank in sorted(replayed)),
        in_flight=tuple(most[stage] for stage in sorted(most)),
    )


def _bubbles(steps: Sequence[Sequence[Step]]) -> list[float]:
    """Of each rank of one pipeline, by the clock on the wall."""
    ratios: list[list[float]] = [[] for _ in steps]
    for of_ranks in zip(*steps, strict=True):
        begin = min(recorded.begin for step in of_ranks for recorded in step)
        end = max(recorded.end for step in of_ranks for recorded in step)
        for of_rank, step in zip(ratios, of_ranks, strict=True):
            of_rank.append(1.0 - sum(recorded.end - recorded.begin for recorded in step) / (end - begin))
    return [median(of_rank) for of_rank in ratios]


def _own_seconds(steps: Sequence[Step]) -> dict[Action, float]:
    """The median processor seconds of each action of one rank, in order."""
    orders = {tuple(recorded.action for recorded in step) for step in steps}
    if len(orders) > 1:
        raise ValueError(f"pipeline: expected the same actions in each step, got {' and '.join(map(' '.join, orders))}")
    return {
        Action.parse(of_steps[0].action): median(recorded.cpu_seconds for recorded in of_steps)
        for of_steps in zip(*steps, strict=True)
    }


def replayed_bubbles(ranks: Sequence[Mapping[Action, float]]) -> list[float]:
    """The part of the whole in which each rank waits, where its actions, in order, take the given seconds and messages
    none. ValueError where an action waits for what nobody does."""
    last_stage = max(action.stage for seconds in ranks for action in seconds)
    waiting = [list(seconds.items()) for seconds in ranks]
    free_at = [0.0] * len(ranks)
    done: dict[Action, float] = {}
    while any(waiting):
        before = len(done)
        for rank, actions in enumerate(waiting):
            while actions and (ready_at := _ready_at(actions[0][0], done, last_stage)) is not None:
                action, seconds = actions.pop(0)
                done[action] = free_at[rank] = max(free_at[rank], ready_at) + seconds
        if len(done) == before:
            heads = ", ".join("{}{}{}".format(*actions[0][0]) for actions in waiting if actions)
            raise ValueError(f"pipeline: what was recorded cannot be played again: every rank waits, at {heads}")
    return [1.0 - sum(seconds.values()) / max(free_at) for seconds in ranks]


def _ready_at(action: Action, done: Mapping[Action, float], last_stage: int) -> float | None:
    """When the message comes that the action waits for; None as long as that is not known."""
    if action.kind == "W" or (action.stage == 0 if action.kind == "F" else action.stage == last_stage):
        return 0.0
    if action.kind == "F":
        return done.get(action._replace(stage=action.stage - 1))
    ends = [done.get(Action(action.stage + 1, kind, action.micro_batch)) for kind in "BI"]
    return next((end for end in ends if end is not None), None)
