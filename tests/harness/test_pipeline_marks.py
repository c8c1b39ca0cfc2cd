"""Marks of a pipeline's actions: read back, heard by who looks, and seen by a profiler where nobody does."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch.profiler import ProfilerActivity, profile

from harness.pipeline_marks import Action, observed_by, pipeline_action


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    @contextmanager
    def computing(self, action: str, in_flight: Callable[[], int]) -> Iterator[None]:
        yield
        self.heard.append((action, in_flight()))


def test_an_action_is_read_from_its_text() -> None:
    assert Action.parse("12I3") == Action(stage=12, kind="I", micro_batch=3)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 ", "meshmark.2F0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"expected the mark of an action such as 2F0, got {text!r}")):
        Action.parse(text)


def test_who_looks_hears_of_actions_and_asks_at_their_end() -> None:
    outer, inner = Listener(), Listener()
    held: list[int] = []
    with observed_by(outer):
        with pipeline_action("0F0", lambda: len(held)):
            held.append(0)
        with observed_by(inner), pipeline_action("0B0", lambda: len(held)):
            held.clear()
    with pipeline_action("0F1", lambda: 1 // 0):
        pass
    assert (outer.heard, inner.heard) == ([("0F0", 1)], [("0B0", 0)])


def test_a_profiler_sees_them_where_nobody_looks() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, pipeline_action("3W1", int):
        pass
    assert "meshmark.3W1" in [event.key for event in profiler.key_averages()]
