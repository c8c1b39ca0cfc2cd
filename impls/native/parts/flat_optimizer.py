"""AdamW and SGD over flat buckets: one fused update for each run of elements that share weight decay and step count.

A bucket starts as two runs at most, decayed and not. A parameter that nobody used in a step must not decay, nor move by
its momentum, nor count the step: from then on its bucket is stepped parameter by parameter.

AdamW: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.precision import Precision
from harness.workload import Training
from impls.native.parts import flat_memory
from impls.native.parts.bucket_sums import Piece
from impls.native.parts.buckets import BucketPlan, Segment


@dataclass(kw_only=True)
class _Run:
    """Elements [start, stop) of the bucket, stepped together. `num_steps` is fused AdamW's own step counter, zero for
    SGD; `names` are the parameters that lie there."""

    start: int
    stop: int
    weight_decay: float
    num_steps: Tensor
    names: tuple[str, ...]


def converted_bytes(plans: Iterable[BucketPlan], precision: Precision) -> int:
    """What an update makes of a bucket's gradients to step masters of another dtype, of the largest of `plans`."""
    if precision.master in (None, precision.gradient):
        return 0
    return max((plan.num_elements * precision.master.itemsize for plan in plans), default=0)


class FlatOptimizer:
    """Masters, moments and step counters of one bucket; `parameters` (num_elements,) is its flat parameter buffer,
    `master` the dtype of the masters, None where the parameters themselves are stepped."""

    def __init__(
        self, plan: BucketPlan, parameters: Tensor, training: Training, master: torch.dtype | None = None
    ) -> None:
        self._plan = plan
        self._training = training
        self.parameters = parameters
        self.master = parameters
        if master is not None:
            self.master = flat_memory.zeros(plan.num_elements, master, parameters.device).copy_(parameters)
        num_moments = 2 if training.optimizer == "adamw" else int(training.momentum > 0)
        self.moments = [
            flat_memory.zeros(plan.num_elements, self.master.dtype, parameters.device) for _ in range(num_moments)
        ]
        self._per_parameter = False
        decayed = [segment for segment in plan.segments if segment.parameter.decayed]
        others = [segment for segment in plan.segments if not segment.parameter.decayed]
        self._runs = [self._run(*segments) for segments in (decayed, others) if any(s.start < s.stop for s in segments)]

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
    ) -> Tensor | None:
        """One update from the pieces of `gradients`, which cover the bucket. With a `gradient_scale` they are divided
        by it on the way: in place, except where masters make a copy of them first. Returns the scale by which the
        gradients have been divided for good, if any. The parameters named in `unused` are left alone, with their
        moments and step counts."""
        if unused and not self._per_parameter:
            self._split()
        runs = [run for run in self._runs if not unused or run.names[0] not in unused]
        if not runs:
            return None
        scale_left = None
        if self._training.optimizer == "adamw":
            torch._foreach_add_([run.num_steps for run in runs], 1)
        for start, stop, values in gradients:
            in_masters_dtype = values.to(self.master.dtype)
            if gradient_scale is not None and in_masters_dtype is values:
                scale_left = gradient_scale
            self._step_piece(runs, Piece(start, stop, in_masters_dtype), learning_rate, gradient_scale)
        if self.has_masters:
            self.parameters.copy_(self.master)
        return scale_left

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
                cut(self.moments[0]) if self.moments else [],
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

    def _run(self, *segments: Segment) -> _Run:
        """One run of adjacent segments that all decay, or none of which does."""
        return _Run(
            start=segments[0].start,
            stop=segments[-1].stop,
            weight_decay=self._training.weight_decay if segments[0].parameter.decayed else 0.0,
            num_steps=torch.zeros((), dtype=torch.float32, device=self.master.device),
            names=tuple(segment.parameter.name for segment in segments),
        )

    def _split(self) -> None:
        """From two runs to one per parameter, each going on from the count of the run it was part of."""
        counts = {name: run.num_steps for run in self._runs for name in run.names}
        self._runs = [self._run(segment) for segment in self._plan.segments if segment.start < segment.stop]
        for run in self._runs:
            run.num_steps.copy_(counts[run.names[0]])
        self._per_parameter = True
