"""A stage of a chain as torch.distributed.pipelining takes it, told beforehand what it receives and hands on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.chain import Border, as_value, run_blocks
from harness.implementation import phase
from impls.torch.parts.pipeline_plan import PipelinePlan

if TYPE_CHECKING:
    from impls.torch.parts.marked_stage import MarkedStage


class StageModule(nn.Module):
    """Consecutive blocks; each tensor that comes in is an argument of its own. Torch sends contiguous tensors only."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        with phase("forward"):
            value: Tensor | tuple[Tensor, ...] = as_value(self.tensors(inputs))
        return value

    def tensors(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What comes out of the last block."""
        return [tensor.contiguous() for tensor in run_blocks(list(self.blocks), inputs)]


def make_stage(
    plan: PipelinePlan, stage: int, module: nn.Module, device: torch.device, group: dist.ProcessGroup
) -> MarkedStage:
    """With static shapes: otherwise the first step would run forward and backward once more to find them."""
    # Brings FSDP and torch.export along: only ranks pay for it.
    from impls.torch.parts.marked_stage import MarkedStage

    return MarkedStage(
        module,
        stage,
        plan.num_stages,
        device,
        input_args=examples(plan.inputs[stage]),
        output_args=examples(plan.outputs[stage]),
        group=group,
    )


def received_tensors(stage: MarkedStage) -> list[Tensor]:
    """Where the stage receives activations and their gradients, of all micro-batches; none before the first step."""
    of_micro_batches = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
    return [info.buffer for infos in of_micro_batches for info in infos if info.buffer is not None]


def examples(border: Border) -> tuple[Tensor, ...]:
    """Tensors without memory that look like those which cross it."""
    return tuple(
        torch.empty(shape.shape, dtype=shape.dtype, device="meta", requires_grad=shape.carries_gradient)
        for shape in border
    )
