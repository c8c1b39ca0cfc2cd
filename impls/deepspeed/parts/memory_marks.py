"""Marks by which the memory instrument knows what an engine makes in the course of a step and lets go of in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

from harness.implementation import lending, phase

_Mark = Callable[[], AbstractContextManager[Any]]


def mark_buffers(engine: Any) -> None:
    """Without ZeRO gradients are summed in one flat copy, which is made even where there is nobody to sum with; with it
    in a bucket that backward finds there."""
    lent = partial(lending, "communication_buffers")
    engine.buffered_allreduce_fallback = _within(lent, engine.buffered_allreduce_fallback)
    if hasattr(engine.optimizer, "setup_buckets"):
        engine.optimizer.setup_buckets = _within(lent, engine.optimizer.setup_buckets)


def mark_backward(engine: Any) -> None:
    """Of each micro-batch, which a pipeline's engine runs by itself."""
    from deepspeed.runtime.pipe.schedule import BackwardPass

    carry_out = engine._INSTRUCTION_MAP[BackwardPass]
    marked = _within(partial(phase, "backward"), carry_out)
    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, BackwardPass: marked}


def _within(mark: _Mark, act: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(act)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with mark():
            return act(*args, **kwargs)

    return marked
