"""An implementation that evaluates before every step it takes, other batches too, and looks at whether that is right
and leaves everything as it was. What it finds wrong fails the launch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.implementation import EvaluationOutput, Implementation, StepOutput, load
from harness.layout import Layout
from harness.mesh import Mesh
from harness.workload import Batch, Workload


class Evaluating(Implementation):
    """Trains as the implementation `of` does with `options`, written as JSON."""

    strategy = "none"

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        of: str = "reference",
        options: str = "{}",
    ) -> None:
        self.workload = workload
        self.inner = load(of)(workload, layout, mesh, device, **json.loads(options))
        self.module: nn.Module = self.inner.module
        self.num_steps = 0

    def train_step(self, batch: Batch) -> StepOutput:
        first, *others = batch.micro_batches
        shorter = replace(first, inputs=first.inputs[:1], targets=first.targets[:1])
        shorter = replace(shorter, num_tokens=self.workload.count(shorter.targets))
        before = self._state()
        for micro_batches in ((first, *others, first), (shorter,)):
            self._check_evaluation(replace(batch, micro_batches=micro_batches))
        assert _alike(self._state(), before), "an evaluation left a trace"
        self.num_steps += 1
        self.inner.tracks_gradient_norm = self.tracks_gradient_norm
        return self.inner.train_step(batch)

    def _check_evaluation(self, batch: Batch) -> None:
        """Against a whole model in this process."""
        model = self.workload.build_model()
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for name, value in (self.inner.full_parameters() | self._first_ranks_buffers()).items():
                held[name].copy_(value)
        output = self.inner.evaluate(batch)
        assert output is not None
        assert output.num_tokens == batch.num_tokens
        if output.loss_sum is not None:
            assert not output.loss_sum.requires_grad
            with torch.no_grad(), torch.random.fork_rng():
                right = sum(float(self.workload.loss_sum(model.eval(), m)) for m in batch.micro_batches)
            assert abs(float(output.loss_sum) - right) <= 1e-12 * abs(right), (float(output.loss_sum), right)

    def _first_ranks_buffers(self) -> dict[str, Tensor]:
        """Those that evaluation uses: some ranks may not have them yet."""
        of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_ranks, self.inner.full_buffers())
        found: dict[str, Tensor] = of_ranks[0]
        return found

    def _state(self) -> dict[str, Any]:
        return {
            "random": torch.get_rng_state(),
            "modes": {name: module.training for name, module in self.module.named_modules()},
            "buffers": {name: buffer.clone() for name, buffer in self.module.named_buffers()},
            "places": {name: id(buffer) for name, buffer in self.module.named_buffers()},
            "parameters": self.inner.full_parameters(),
            "gradients": self.inner.full_gradients() if self.num_steps else {},
        }

    def evaluate(self, batch: Batch) -> EvaluationOutput | None:
        return self.inner.evaluate(batch)

    def full_gradients(self) -> dict[str, Tensor]:
        return self.inner.full_gradients()

    def full_parameters(self) -> dict[str, Tensor]:
        return self.inner.full_parameters()

    def full_buffers(self) -> dict[str, Tensor]:
        return self.inner.full_buffers()

    def replicated_tensors(self) -> Iterable[Tensor]:
        return self.inner.replicated_tensors()

    def close(self) -> None:
        self.inner.close()


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return bool(torch.equal(one, other)) if isinstance(one, Tensor) else bool(one == other)
