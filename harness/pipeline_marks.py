"""What a pipeline tells of a step while it trains, and what theory says of it beforehand. An action goes by its text:

2F0   stage 2, forward of micro-batch 0
2B0   its backward, whole
2I0   its backward towards the inputs alone
2W0   its backward towards the weights alone
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One piece of work of one stage on one micro-batch; `kind` is F, B, I or W."""

    stage: int
    kind: str
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """ValueError, which shows the text, unless it is as above."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"pipeline: expected the mark of an action such as 2F0, got {text!r}")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True, kw_only=True)
class PredictedPipeline:
    """Of a schedule whose stages take equally long, a backward twice a forward, and messages no time: the part of each
    rank's time in which it waits, and the most micro-batches of which each stage holds activations at a time. Stage s
    lies on rank s modulo the number of ranks; `timeline` is a drawing, a line a rank."""

    schedule: str
    bubble_ratio: float
    in_flight: tuple[int, ...]
    timeline: str


class ActionObserver(Protocol):
    """Who looks at the actions of this rank."""

    def computing(self, action: str, in_flight: Callable[[], int]) -> AbstractContextManager[None]: ...


_observer: ContextVar[ActionObserver | None] = ContextVar("observer of pipeline actions", default=None)


def pipeline_action(action: str, in_flight: Callable[[], int]) -> AbstractContextManager[Any]:
    """Marks the computing of `action`, without the waiting for messages before it. `in_flight` tells of how many
    micro-batches its stage holds activations; it is asked at the end. When nobody looks it costs what `phase` does."""
    observer = _observer.get()
    if observer is None:
        return torch.profiler.record_function(f"meshmark.{action}")
    return observer.computing(action, in_flight)


@contextmanager
def observed_by(observer: ActionObserver) -> Iterator[None]:
    """While inside, marks on this thread go to `observer`."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)
