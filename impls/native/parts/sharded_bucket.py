"""One bucket of one rank under a sharded optimizer: where whole gradients gather, this rank's shard of their sum, and
the optimizer that steps this rank's shard of the parameters.

Unused parameters are told apart as in [Note: Unused parameters] of gradient_bucket.py, with one mark for each shard
that a parameter reaches into: the owner of a shard sees no other. Sums over micro-batches keep the mark: only when
every addend is -0.0 is their sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.workload import Workload
from impls.native.parts.bucket_sums import Piece
from impls.native.parts.buckets import view_like
from impls.native.parts.flat_optimizer import FlatOptimizer
from impls.native.parts.gradient_bucket import Announcements
from impls.native.parts.shards import ShardedPlan


class ShardedBucket:
    """`gradients` (num_padded_elements,) takes what backward yields, `shard_gradients` (num_shard_elements,) the sum of
    this rank's shard, `shard_parameters` (num_shard_elements,) is what it steps. `templates` have the parameters'
    shapes and strides."""

    def __init__(
        self,
        plan: ShardedPlan,
        rank: int,
        *,
        gradients: Tensor,
        shard_gradients: Tensor,
        shard_parameters: Tensor,
        templates: Mapping[str, Tensor],
        workload: Workload,
    ) -> None:
        self.plan = plan
        self.gradients = gradients
        self.shard_gradients = shard_gradients
        self._shard = plan.shard(rank)
        own_parameters = shard_parameters[: self._shard.num_elements]
        self.optimizer = FlatOptimizer(self._shard, own_parameters, workload.training, workload.precision.master)
        self.gradient_views = {
            segment.parameter.name: view_like(gradients, segment, templates[segment.parameter.name])
            for segment in plan.bucket.segments
        }
        firsts = [first for of_parameter in plan.first_elements.values() for first in of_parameter]
        self._first_elements = torch.tensor(firsts, dtype=torch.int64, device=gradients.device)
        self.filled: set[str] = set()  # since the last exchange
        self.used: set[str] = set()  # in this step, by this rank
        self.unused: set[str] = set()  # in this step, by all ranks, of those that reach into this shard
        self.early: dict[str, Tensor] = {}  # gradients that came before the slot was free
        self.announcements = Announcements(segment.parameter.name for segment in plan.bucket.segments)
        self.scale_left: Tensor | None = None  # by which clipping has divided the gradients

    @property
    def own_gradients(self) -> Tensor:
        """This rank's shard of the sum, without padding."""
        return self.shard_gradients[: self._shard.num_elements]

    def start_step(self) -> None:
        self.used.clear()
        self.unused = set()
        self.scale_left = None
        self.start_filling()

    def start_filling(self) -> None:
        """What comes from now on belongs to the next exchange."""
        self.filled.clear()
        self.announcements.begin()

    def mark_unused(self) -> None:
        """Before an exchange."""
        if self._first_elements.numel():
            self.gradients[self._first_elements] += 0.0  # -0.0 + 0.0 is 0.0
        self.used |= self.filled
        for segment in self.plan.bucket.segments:
            name = segment.parameter.name
            if name not in self.filled:
                self.gradients[segment.start : segment.stop].zero_()
                for first in self.plan.first_elements[name]:
                    self.gradients[first].fill_(-0.0)

    def settle(self) -> None:
        """The sum over all micro-batches and ranks is there: finds out which parameters nobody used."""
        parts = {segment.parameter.name: segment for segment in self._shard.segments}
        for segment in self.plan.bucket.segments:
            name = segment.parameter.name
            if name in self.used:
                continue
            if segment.start == segment.stop:
                self.unused.add(name)
            elif name in parts:
                first = self.shard_gradients[parts[name].start]
                if bool(first.eq(0) & first.signbit()):
                    self.unused.add(name)

    def update(self, learning_rate: float, gradient_scale: Tensor | None = None) -> None:
        """Steps this rank's shard."""
        own = self.own_gradients
        self.scale_left = self.optimizer.step(
            [Piece(0, own.numel(), own)], learning_rate, gradient_scale=gradient_scale, unused=self.unused
        )
