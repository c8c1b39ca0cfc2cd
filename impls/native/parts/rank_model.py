"""What one rank of a data-parallel group trains: the workload's whole model, or its slice of it.

Strategies of the data axis (native.ddp, native.zero) know a model through this alone, so that they go with any cut
along the other axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harness.chain import Border, borders
from harness.evaluation import evaluating, sum_losses
from harness.implementation import EvaluationOutput, phase
from harness.parameters import LogicalParameter, logical_parameters
from harness.workload import Batch, MicroBatch, Workload
from impls.native.parts.direct_gradients import Place, TrainingTask, write_directly
from impls.native.parts.kept_views import KeptViews

Kind = Literal["own", "alike", "partial"]
"""How a parameter stands to those of the same name on the ranks that hold other slices of the model:

    own        another slice of it is there, or nothing
    alike      they hold the same and get the same gradient
    partial    they hold the same, and its gradient is the sum of theirs
"""

Kinds = tuple[Kind | tuple[int, ...], ...]
"""One for each axis along which the model is cut, the innermost first. Along the pipeline it is the ranks that hold the
parameter: where there are several, its gradient is the sum of theirs."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What the data axis has to do around a step's passes. `begin_micro_batch` is told which one it is, `reduce`, when
    backward is over, whether gradients of all are complete."""

    begin_micro_batch: Callable[[int], None]
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    begin_backward: Callable[[], None] = lambda: None
    end_backward: Callable[[], None] = lambda: None
    reduce: Callable[[bool], None] = lambda is_last: None


class RankModel:
    """The whole model of `workload` on `device`; its subclasses hold slices. `parameters` are described as they lie
    here, under the model's own names, with what was decided on the whole ones; `whose` names the strategy in errors.
    `module` is the model where it has been built already."""

    def __init__(
        self, workload: Workload, device: torch.device, whose: str, *, module: nn.Module | None = None
    ) -> None:
        self.workload = workload
        self.device = device
        self.module = on_device(workload.build_model() if module is None else module, device)
        self.kept_views = KeptViews(self.module, whose)
        self.parameters: tuple[LogicalParameter, ...] = logical_parameters(self.module, workload.decays)

    def kinds(self, name: str) -> Kinds:
        return ()

    def loss_sum(self, micro_batch: MicroBatch) -> Tensor:
        """The sum of the losses; all ranks that hold slices of the model get it."""
        return replace(self.workload, loss=self.loss).loss_sum(self.module, micro_batch)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The sum of the losses, from what this rank's slice of the model gives."""
        return self.workload.loss(outputs, targets)

    def forward_backward(self, batch: Batch, task: TrainingTask, passes: Passes) -> tuple[Tensor | None, int]:
        """All micro-batches of a step, each normalised by the step's number of targets; the sum of their losses, None
        where the loss does not live, and the number of this rank's targets."""
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for index, micro_batch in enumerate(batch.micro_batches):
            passes.begin_micro_batch(index)
            with phase("forward"), passes.forward():
                loss = self.loss_sum(micro_batch)
                objective = loss / batch.global_num_tokens
            self.kept_views.check()
            with phase("backward"):
                passes.begin_backward()
                task.starts_at(objective)
                objective.backward()
                task.catch_up()
                passes.end_backward()
            with phase("reduce"):
                passes.reduce(index == len(batch.micro_batches) - 1)
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        return loss_sum, num_tokens

    def evaluate(
        self, batch: Batch, forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> EvaluationOutput:
        """As Implementation.evaluate; `forward` is what the data axis has to do around each micro-batch."""

        def loss_sum(micro_batch: MicroBatch) -> Tensor:
            with forward():
                loss = self.loss_sum(micro_batch)
            self.kept_views.check()
            return loss

        with evaluating(self.module):
            return sum_losses(batch, loss_sum, self.device)

    def borders(self, inputs: Tensor, *, evaluates: bool = False) -> tuple[Border, ...]:
        """What each block of the chain hands to the next on this rank, and the last one yields, for a micro-batch like
        `inputs`, in training or where the model `evaluates`. NoChain where the model is none."""
        return borders(self.workload, inputs, evaluates=evaluates)

    def begin_pass(self, inputs: Tensor) -> None:
        """Blocks will go forward or backward with a micro-batch of these `inputs`, whose `borders` are known."""

    def write_directly(self, places: dict[str, Place], task: TrainingTask) -> None:
        """Has layers write the gradients of the parameters named in `places` there while `task` runs."""
        write_directly(self.module, places, task)

    def sum_partial(self, kinds: Kinds, gradients: Tensor) -> None:
        """Sums, in place, a flat of gradients of such parameters along the axes where they are partial."""

    def counts(self, kinds: Kinds) -> bool:
        """Whether this rank answers for such parameters where each is to be counted once: in a norm."""
        return True

    def norm_over_slices(self, own: Tensor) -> Tensor:
        """The norm over all slices, an fp64 scalar, from this rank's over the parameters that count here."""
        return own

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the parameters' shapes, by name, made whole, on the CPU. Collective; not for timed code."""
        return {name: value.cpu() for name, value in values.items()}

    def whole_buffers(self) -> dict[str, Tensor]:
        """The model's buffers, by name, on the CPU. Collective; not for timed code."""
        return {name: buffer.detach().cpu().clone() for name, buffer in self.module.named_buffers()}

    def communication_buffers(self) -> Iterable[Tensor]:
        """What the exchange between slices holds between steps."""
        return ()

    def facts(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        """Releases what outlives the object."""


def on_device(module: nn.Module, device: torch.device) -> nn.Module:
    """`module` there; not moved where it is already, which tensors without memory would not bear."""
    tensors = (*module.parameters(), *module.buffers())
    return module if all(tensor.device == device for tensor in tensors) else module.to(device)
