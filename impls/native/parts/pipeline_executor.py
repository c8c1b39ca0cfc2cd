"""Carries out one rank's actions of a pipeline step (parts/pipeline_actions.py), whatever schedule they come from.

    F   receive the micro-batch's activations, go forward, send them on      keep inputs and outputs
    B   receive the gradients of the outputs, go backward, send those of the inputs back      let go
    I   as B, but that layers put the gradients of their weights off
    W   what was put off

Before an action is carried out the messages of the next ones are already expected, so that they travel meanwhile. A
step ends with nothing in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from harness.chain import Border
from harness.implementation import phase
from harness.pipeline_marks import pipeline_action
from impls.native.parts.direct_gradients import TrainingTask
from impls.native.parts.pipeline_actions import Action, Kind
from impls.native.parts.pipeline_messages import Messages

Forward = Callable[[int, list[Tensor]], list[Tensor]]
"""(micro-batch, inputs): a stage's outputs; the first stage's inputs are empty, the last one's output is the objective,
a scalar."""

_MESSAGES_AHEAD = 2  # actions whose messages are expected beforehand
MAX_TENSORS = 64  # at a border


@dataclass(kw_only=True)
class StageRun:
    """One stage on its rank, for one step: how it goes forward and what crosses its borders with each micro-batch.
    `begin` is told the micro-batch before each of its passes."""

    begin: Callable[[int], None]
    forward: Forward
    inputs: Sequence[Border]
    outputs: Sequence[Border]


@dataclass(kw_only=True)
class _Alive:
    """A micro-batch whose backward is still to come."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class Executor:
    """`num_ranks` ranks share the stages, `rank` is this one's place; `task` is told when layers may put gradients
    off."""

    def __init__(
        self,
        messages: Messages,
        task: TrainingTask,
        *,
        rank: int,
        num_ranks: int,
        num_stages: int,
    ) -> None:
        self._messages, self._task = messages, task
        self._rank, self._num_ranks, self._num_stages = rank, num_ranks, num_stages

    def run(self, actions: Sequence[Action], stages: Mapping[int, StageRun]) -> None:
        """One step. Collective along the pipeline."""
        self._stages = stages
        self._alive: dict[tuple[int, int], _Alive] = {}
        self._put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._local: dict[tuple[Kind, int, int], list[Tensor]] = {}
        for position, action in enumerate(actions):
            for coming in actions[position : position + 1 + _MESSAGES_AHEAD]:
                self._expect(coming)
            self._carry_out(action)
        self._messages.end_step()
        assert not self._alive and not self._put_off, "a schedule is checked before it is run"

    def _carry_out(self, action: Action) -> None:
        stage, kind, micro_batch = action.stage, action.kind, action.micro_batch
        computing = pipeline_action(str(action), partial(self._in_flight, stage))
        if kind == Kind.FORWARD:
            received = self._received(Kind.FORWARD, stage - 1, stage, micro_batch) if stage else []
            with computing:
                outputs = self._go_forward(action, received)
            if stage + 1 < self._num_stages:
                self._send(Kind.FORWARD, outputs, stage, stage + 1, micro_batch)
        elif kind == Kind.WEIGHT:
            with computing:
                for write in self._put_off.pop((stage, micro_batch)):
                    write()
        else:
            is_last = stage + 1 == self._num_stages
            gradients = None if is_last else self._received(Kind.BACKWARD, stage + 1, stage, micro_batch)
            with computing:
                back = self._go_backward(action, gradients)
            if stage:
                self._send(Kind.BACKWARD, back, stage, stage - 1, micro_batch)

    def _go_forward(self, action: Action, inputs: list[Tensor]) -> list[Tensor]:
        """The stage's outputs."""
        stage, micro_batch = action.stage, action.micro_batch
        run = self._stages[stage]
        for tensor, shape in zip(inputs, run.inputs[micro_batch] if stage else (), strict=True):
            tensor.requires_grad_(shape.carries_gradient)
        run.begin(micro_batch)
        with phase("forward"):
            outputs = run.forward(micro_batch, inputs)
        if torch.is_grad_enabled():  # a backward follows
            self._alive[stage, micro_batch] = _Alive(inputs=inputs, outputs=outputs)
        return outputs

    def _go_backward(self, action: Action, gradients: list[Tensor] | None) -> list[Tensor]:
        """The gradients of the stage's inputs."""
        key = action.stage, action.micro_batch
        alive = self._alive.pop(key)
        outputs = [tensor for tensor in alive.outputs if tensor.requires_grad]
        if outputs:
            self._stages[action.stage].begin(action.micro_batch)
            self._task.puts_off = action.kind == Kind.INPUT
            self._task.starts_at(outputs[0])
            torch.autograd.backward(outputs, gradients)
            self._task.puts_off = False
        if action.kind == Kind.INPUT:
            self._put_off[key] = self._task.take_put_off()
        return [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in alive.inputs
            if tensor.requires_grad
        ]

    def _in_flight(self, stage: int) -> int:
        """Of how many micro-batches the stage holds what a backward still needs."""
        return len({micro_batch for of, micro_batch in (*self._alive, *self._put_off) if of == stage})

    def _expect(self, action: Action) -> None:
        """Has the messages that the action needs on their way."""
        stage, micro_batch = action.stage, action.micro_batch
        run = self._stages[stage]
        if action.kind == Kind.FORWARD and stage and not self._is_here(stage - 1):
            shapes = run.inputs[micro_batch]
            self._messages.expect(shapes, self._rank_of(stage - 1), self._tag(Kind.FORWARD, stage, micro_batch))
        elif (
            action.kind in (Kind.BACKWARD, Kind.INPUT) and stage + 1 < self._num_stages and not self._is_here(stage + 1)
        ):
            shapes = tuple(shape for shape in run.outputs[micro_batch] if shape.carries_gradient)
            self._messages.expect(shapes, self._rank_of(stage + 1), self._tag(Kind.BACKWARD, stage, micro_batch))

    def _send(self, kind: Kind, tensors: list[Tensor], stage: int, to: int, micro_batch: int) -> None:
        if self._is_here(to):
            self._local[kind, to, micro_batch] = [tensor.detach() for tensor in tensors]
        else:
            self._messages.send(tensors, self._rank_of(to), self._tag(kind, to, micro_batch))

    def _received(self, kind: Kind, source: int, stage: int, micro_batch: int) -> list[Tensor]:
        if self._is_here(source):
            return self._local.pop((kind, stage, micro_batch))
        return self._messages.arrived(self._rank_of(source), self._tag(kind, stage, micro_batch))

    def _rank_of(self, stage: int) -> int:
        return stage % self._num_ranks

    def _is_here(self, stage: int) -> bool:
        return self._rank_of(stage) == self._rank

    def _tag(self, kind: Kind, stage: int, micro_batch: int) -> int:
        """Of the first tensor that comes to `stage`."""
        direction = 0 if kind == Kind.FORWARD else 1
        return ((micro_batch * self._num_stages + stage) * 2 + direction) * MAX_TENSORS
