"""Lines changed, on implementations written for it: the plain ones here never run."""

from __future__ import annotations

from typing import Any

import pytest

from harness import code_change, implementation
from harness.code_change import num_changed_lines, training_lines


class Plain:
    """Trains in one process."""

    def __init__(self, workload: Any, layout: Any, mesh: Any, device: Any) -> None:
        self.module = workload.build_model()
        self.optimizer = workload.make_optimizer(self.module)

    def train_step(self, batch: Any) -> Any:
        for micro_batch in batch.micro_batches:
            loss = self.module(micro_batch)
            loss.backward()
        self.optimizer.step()
        return loss


class Reformatted(Plain):
    """The same, written otherwise, with an option that the harness passes."""

    def __init__(self, workload: Any, layout: Any, mesh: Any, device: Any, *, option: int = 3) -> None:
        """Says what it does."""
        # And why.
        self.module = workload.build_model()

        self.optimizer = workload.make_optimizer(
            self.module,
        )


class Wrapped(Plain):
    def __init__(self, workload: Any, layout: Any, mesh: Any, device: Any) -> None:
        self.module = workload.build_model()
        self.wrapped = _wrap(self.module, mesh.group("data"))  # one line more
        self.optimizer = workload.make_optimizer(self.module)

    def train_step(self, batch: Any) -> Any:
        with _twice(self.wrapped):
            for micro_batch in batch.micro_batches:
                loss = self.wrapped(micro_batch)
                loss.backward()
        self.optimizer.step()
        return loss

    def full_gradients(self) -> None:
        """No part of the training."""


class Shorter(Plain):
    def train_step(self, batch: Any) -> Any:
        for micro_batch in batch.micro_batches:
            self.module(micro_batch).backward()
        self.optimizer.step()


def _wrap(module: Any, group: Any) -> Any:
    return _twice(module) if group else module


def _twice(module: Any) -> Any:
    return [module, module]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_change.implementation, "load", lambda name: Plain)


@pytest.mark.parametrize(
    ("kind", "num_lines"),
    [
        (Plain, 0),
        (Reformatted, 0),
        (Wrapped, 3),  # the wrapping, `with`, the wrapped call
        (Shorter, 3),  # two lines became another, and `return loss` went
    ],
)
def test_lines_altered_added_and_taken_away_count_once(kind: Any, num_lines: int) -> None:
    assert num_changed_lines(kind) == num_lines


def test_lines_are_logical_ones_of_the_two_bodies() -> None:
    assert training_lines(Plain) == [  # type: ignore[arg-type]
        "self.module = workload.build_model()",
        "self.optimizer = workload.make_optimizer(self.module)",
        "for micro_batch in batch.micro_batches:",
        "loss = self.module(micro_batch)",
        "loss.backward()",
        "self.optimizer.step()",
        "return loss",
    ]


def test_plain_training_is_what_runs_without_options() -> None:
    class Optional(Plain):
        def __init__(self, workload: Any, layout: Any, mesh: Any, device: Any, *, shards: bool = False) -> None:
            self.module = workload.build_model()
            self.optimizer = workload.make_optimizer(self.module)
            if shards:
                self.optimizer = _wrap(self.optimizer, layout)

    plain = training_lines(Plain)  # type: ignore[arg-type]
    assert training_lines(Optional, leaves_out_options=True) == plain  # type: ignore[arg-type]
    assert len(training_lines(Optional)) == len(plain) + 2  # type: ignore[arg-type]


def test_what_has_no_source_has_no_lines() -> None:
    namespace: dict[str, Any] = {}
    exec("class Typed:\n  def __init__(self): pass\n  def train_step(self): pass", namespace)
    assert num_changed_lines(namespace["Typed"]) is None


def test_the_harness_own_plain_training_differs_in_its_options_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    floor = implementation.load(code_change.PLAIN_TRAINING)
    assert num_changed_lines(floor) == len(training_lines(floor)) - len(training_lines(floor, leaves_out_options=True))
    assert num_changed_lines(implementation.load("torch.ddp")) == 12
