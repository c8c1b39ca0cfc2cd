"""AdamW and SGD over flat buckets: one fused update for each run of elements that share weight decay and step count.

A bucket starts as two runs at most, decayed and not. A parameter that nobody used in a step must not decay, nor move by
its momentum, nor count the step: from then on its bucket is stepped parameter by parameter.

AdamW: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.precision import Precision
from harness.workload import Training
from impls.native.parts import flat_memory
from impls.native.parts.bucket_sums import Piece
from impls.native.parts.buckets import BucketPlan


@dataclass(kw_only=True)
class _Run:
    """Elements [start, stop) of the bucket, stepped together. `num_steps` is the fused kernel's own step counter."""

    start: int
    stop: int
    weight_decay: float
    num_steps: Tensor


class FlatOptimizer:
    """Masters, moments and step counters of one bucket; `parameters` (num_elements,) is its flat parameter buffer."""

    def __init__(self, plan: BucketPlan, parameters: Tensor, training: Training, precision: Precision) -> None:
        self._plan = plan
        self._training = training
        self.parameters = parameters
        has_masters = precision.master is not None and plan.dtype != precision.master
        self.master = parameters
        if has_masters and precision.master is not None:
            self.master = flat_memory.zeros(plan.num_elements, precision.master, parameters.device).copy_(parameters)
        num_moments = 2 if training.optimizer == "adamw" else 1
        self.moments = [
            flat_memory.zeros(plan.num_elements, self.master.dtype, parameters.device) for _ in range(num_moments)
        ]
        self.scale_left_in_gradients: Tensor | None = None
        self._per_parameter = False
        bounds = [(0, plan.num_decayed, True), (plan.num_decayed, plan.num_elements, False)]
        self._runs = [self._run(start, stop, decayed) for start, stop, decayed in bounds if start < stop]

    @property
    def has_masters(self) -> bool:
        return self.master is not self.parameters

    def state_tensors(self) -> Iterator[Tensor]:
        """Everything held between steps beside parameters and gradients."""
        if self.has_masters:
            yield self.master
        yield from self.moments
        yield from (run.num_steps for run in self._runs)

    def step(
        self,
        gradients: Sequence[Piece],
        learning_rate: float,
        *,
        gradient_scale: Tensor | None = None,
        unused: Collection[str] = (),
    ) -> None:
        """One update from the pieces of `gradients`, which cover the bucket. With a `gradient_scale` they are divided
        by it on the way: in place, except where masters make a copy of them first; `scale_left_in_gradients` tells.
        The parameters named in `unused` are left alone, with their moments and step counts."""
        if unused and not self._per_parameter:
            self._split()
        runs = [run for run in self._runs if not unused or self._name_of(run) not in unused]
        self.scale_left_in_gradients = None
        if not runs:
            return
        torch._foreach_add_([run.num_steps for run in runs], 1)
        for start, stop, values in gradients:
            in_masters_dtype = values.to(self.master.dtype)
            if gradient_scale is not None and in_masters_dtype is values:
                self.scale_left_in_gradients = gradient_scale
            self._step_piece(runs, Piece(start, stop, in_masters_dtype), learning_rate, gradient_scale)
        if self.has_masters:
            self.parameters.copy_(self.master)

    def _step_piece(self, runs: list[_Run], piece: Piece, learning_rate: float, gradient_scale: Tensor | None) -> None:
        if gradient_scale is not None and piece.values.dtype != torch.float32:
            piece.values.div_(gradient_scale)  # the fused kernels take an fp32 scale only
            gradient_scale = None
        elif gradient_scale is not None:
            gradient_scale = gradient_scale.to(torch.float32)
        for weight_decay in dict.fromkeys(run.weight_decay for run in runs):
            alike = [
                (max(run.start, piece.start), min(run.stop, piece.stop), run.num_steps)
                for run in runs
                if run.weight_decay == weight_decay and run.start < piece.stop and piece.start < run.stop
            ]
            if alike:
                self._fused(alike, piece, weight_decay, learning_rate, gradient_scale)

    def _fused(
        self,
        spans: list[tuple[int, int, Tensor]],
        piece: Piece,
        weight_decay: float,
        learning_rate: float,
        gradient_scale: Tensor | None,
    ) -> None:
        """One fused call over `spans` (start, stop, step counter) of the piece."""

        def cut(flat: Tensor, offset: int = 0) -> list[Tensor]:
            return [flat[start - offset : stop - offset] for start, stop, _ in spans]

        training = self._training
        if training.optimizer == "sgd":
            torch._fused_sgd_(
                cut(self.master),
                cut(piece.values, piece.start),
                cut(self.moments[0]),
                weight_decay=weight_decay,
                momentum=training.momentum,
                lr=learning_rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,  # momentum starts as zeros, which is the same as starting from the gradient
                grad_scale=gradient_scale,
            )
            return
        torch._fused_adamw_(
            cut(self.master),
            cut(piece.values, piece.start),
            cut(self.moments[0]),
            cut(self.moments[1]),
            [],
            [num_steps for _, _, num_steps in spans],
            lr=learning_rate,
            beta1=training.beta1,
            beta2=training.beta2,
            weight_decay=weight_decay,
            eps=training.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=gradient_scale,
        )

    def _run(self, start: int, stop: int, decayed: bool) -> _Run:
        decay = self._training.weight_decay if decayed else 0.0
        num_steps = torch.zeros((), dtype=torch.float32, device=self.master.device)
        return _Run(start=start, stop=stop, weight_decay=decay, num_steps=num_steps)

    def _split(self) -> None:
        """From two runs to one per parameter, each going on from the count of the run it was part of."""
        counts = {run.weight_decay: run.num_steps for run in self._runs}
        self._runs = []
        for segment in self._plan.segments:
            if segment.start < segment.stop:
                run = self._run(segment.start, segment.stop, segment.parameter.decayed)
                run.num_steps.copy_(counts[run.weight_decay])
                self._runs.append(run)
        self._per_parameter = True

    def _name_of(self, run: _Run) -> str:
        return next(s.parameter.name for s in self._plan.segments if (s.start, s.stop) == (run.start, run.stop))
