"""An implementation that looks, in every step, at the gradient of what the model is given, and a model that is given
numbers. What it finds wrong fails the launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.datasets import Tensors
from harness.implementation import StepOutput
from harness.layout import Layout
from harness.mesh import Mesh
from harness.tensor_plan import ColumnParallel, RowParallel, VocabularyParallel
from harness.workload import Batch, Training, Workload, children_of_sequential
from tests.impls.evaluating import Evaluating

WIDTH, LENGTH, VOCABULARY = 6, 5, 9


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.gate(x).sigmoid() * self.up(x))
        return output


class Block(nn.Module):
    """Begins with a region: nothing stands between its input's gradient and the exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.norm = Gated(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.gated(x))


def workload(num_micro_batches: int = 3) -> Workload:
    generator = torch.Generator().manual_seed(3)
    return Workload(
        name="numbers",
        model=lambda: nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
        dataset=Tensors(
            torch.randn(64, LENGTH, WIDTH, generator=generator),
            torch.randint(VOCABULARY, (64, LENGTH), generator=generator),
        ),
        training=Training(global_batch_size=8, num_micro_batches=num_micro_batches),
        blocks=lambda model: list(model.children())[:2],
        tensor_plan=lambda model: {
            "*.gate": ColumnParallel(),
            "*.up": ColumnParallel(),
            "*.down": RowParallel(),
            "3": VocabularyParallel(),
        },
        chain=children_of_sequential,
    )


class InputGradients(Evaluating):
    """Ranks of the first stage, which come first, are to have one, and no others."""

    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device, **options: Any) -> None:
        super().__init__(workload, layout, mesh, device, **options)
        self.ranks_a_stage = layout.world_size // layout.pipeline

    def train_step(self, batch: Batch) -> StepOutput:
        model = self.workload.build_model()
        model.load_state_dict(self.inner.full_parameters())
        given = [self._differentiated(m.inputs) for m in batch.micro_batches]
        watched = tuple(
            replace(micro_batch, inputs=inputs) for micro_batch, inputs in zip(batch.micro_batches, given, strict=True)
        )
        self.inner.tracks_gradient_norm = self.tracks_gradient_norm
        output = self.inner.train_step(replace(batch, micro_batches=watched))
        found = [inputs.grad for inputs in given]
        is_first_stage = torch.distributed.get_rank() < self.ranks_a_stage
        assert all((gradient is not None) == is_first_stage for gradient in found)
        for micro_batch, gradient in zip(batch.micro_batches, found, strict=True):
            inputs = self._differentiated(micro_batch.inputs)
            (self.workload.loss_sum(model, replace(micro_batch, inputs=inputs)) / batch.global_num_tokens).backward()
            assert inputs.grad is not None
            if gradient is not None:
                furthest = float((gradient - inputs.grad).abs().max() / inputs.grad.abs().max())
                assert furthest <= 1e-12, f"the gradient of the input is {furthest:.3g} of its size off"
        return output

    @staticmethod
    def _differentiated(inputs: Tensor) -> Tensor:
        return inputs.detach().clone().requires_grad_()
