"""One bucket of one rank under data parallel: where gradients gather, are summed and are stepped from.

[Note: Unused parameters] A parameter unused on some ranks counts as zero there; one unused on all must keep no
gradient at all: no decay, no momentum. Telling the two apart takes no further exchange: an unused parameter's
first element is sent as -0.0, a used one's never is, and only -0.0 + -0.0 is -0.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness.workload import Workload
from impls.native.parts.bucket_sums import Piece
from impls.native.parts.buckets import BucketPlan, Segment, flatten_parameters, view_like
from impls.native.parts.flat_optimizer import FlatOptimizer


class GradientBucket:
    """One bucket of one rank: its gradients (num_elements,), its optimizer, and how far this step has come."""

    def __init__(
        self,
        plan: BucketPlan,
        parameters: dict[str, nn.Parameter],
        gradients: Tensor,
        workload: Workload,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.gradients = gradients
        flat = flatten_parameters(plan, parameters, device)
        self.optimizer = FlatOptimizer(plan, flat, workload.training, workload.precision.master)
        self.gradient_views = {
            segment.parameter.name: view_like(gradients, segment, parameters[segment.parameter.name])
            for segment in plan.segments
        }
        self.parameter_pointers = {s.parameter.name: parameters[s.parameter.name].data_ptr() for s in plan.segments}
        self._segments = {segment.parameter.name: segment for segment in plan.segments}
        starts = [segment.start for segment in plan.segments if segment.start < segment.stop]
        self._first_elements = torch.tensor(starts, dtype=torch.int64, device=gradients.device)
        self.filled: set[str] = set()
        self.unused: set[str] = set()
        self.num_awaited = len(plan.segments)
        self.pieces: Sequence[Piece] = ()
        self.scale_left: Tensor | None = None  # by which clipping has divided the gradients

    def start_step(self) -> None:
        self.filled.clear()
        self.unused = set()
        self.scale_left = None
        self.num_awaited = len(self.plan.segments)

    def mark_unused(self) -> None:
        """See [Note: Unused parameters]."""
        if self._first_elements.numel():
            self.gradients[self._first_elements] += 0.0  # -0.0 + 0.0 is 0.0
        for name, segment in self._segments.items():
            if name not in self.filled:
                self.gradients[segment.start : segment.stop].zero_()
                self.gradients[segment.start : segment.start + 1].fill_(-0.0)

    def take(self, pieces: Sequence[Piece]) -> None:
        """The sum is there: keeps its pieces and finds out which parameters nobody used."""
        self.pieces = pieces
        locally_unused = [s for s in self.plan.segments if s.parameter.name not in self.filled]
        self.unused = {s.parameter.name for s in locally_unused if self._is_marked(s)}

    def update(self, learning_rate: float, gradient_scale: Tensor | None = None) -> None:
        self.scale_left = self.optimizer.step(
            self.pieces, learning_rate, gradient_scale=gradient_scale, unused=self.unused
        )

    def _is_marked(self, segment: Segment) -> bool:
        if segment.start == segment.stop:
            return True
        piece = next(piece for piece in self.pieces if piece.start <= segment.start < piece.stop)
        first = piece.values[segment.start - piece.start]
        return bool(first.eq(0) & first.signbit())
