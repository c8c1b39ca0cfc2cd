"""What one rank of a data-parallel group trains: the workload's whole model, or its slice of it.

Strategies of the data axis (native.ddp, native.zero) know a model through this alone, so that they go with any cut
along the other axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from harness.implementation import phase
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


class RankModel:
    """The whole model of `workload` on `device`; its subclasses hold slices. `parameters` are described as they lie
    here, under the model's own names, with what was decided on the whole ones; `whose` names the strategy in errors.
    `module` is the model where it has been built already."""

    def __init__(
        self, workload: Workload, device: torch.device, whose: str, *, module: nn.Module | None = None
    ) -> None:
        self.workload = workload
        self.device = device
        self.module: nn.Module = (workload.build_model() if module is None else module).to(device)
        self.kept_views = KeptViews(self.module, whose)
        self.parameters: tuple[LogicalParameter, ...] = logical_parameters(self.module, workload.decays)

    def kind(self, name: str) -> Kind:
        return "own"

    def loss_sum(self, micro_batch: MicroBatch) -> Tensor:
        """The sum of the losses; all ranks that hold slices of the model get it."""
        return self.workload.loss_sum(self.module, micro_batch)

    def forward_backward(
        self,
        batch: Batch,
        task: TrainingTask,
        begin_micro_batch: Callable[[int], None],
        end_backward: Callable[[], None],
    ) -> tuple[Tensor | None, int]:
        """All micro-batches of a step, each normalised by the step's number of targets; the sum of their losses, None
        where the loss does not live, and the number of this rank's targets. `end_backward` is called when gradients of
        a micro-batch are complete, or those of several."""
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for index, micro_batch in enumerate(batch.micro_batches):
            begin_micro_batch(index)
            with phase("forward"):
                loss = self.loss_sum(micro_batch)
                objective = loss / batch.global_num_tokens
            self.kept_views.check()
            with phase("backward"):
                task.starts_at(objective)
                objective.backward()
                task.catch_up()
                end_backward()
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        return loss_sum, num_tokens

    def write_directly(self, places: dict[str, Place], task: TrainingTask) -> None:
        """Has layers write the gradients of the parameters named in `places` there while `task` runs."""
        write_directly(self.module, places, task)

    def sum_partial(self, gradients: Tensor) -> None:
        """Sums, in place, a flat of gradients of partial parameters over the ranks that hold slices of the model."""

    def counts(self, kind: Kind) -> bool:
        """Whether this rank answers for such parameters where each is to be counted once: in a norm."""
        return True

    def norm_over_slices(self, own: Tensor) -> Tensor:
        """The norm over all slices, an fp64 scalar, from this rank's over the parameters that count here."""
        return own

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the parameters' shapes, by name, made whole, on the CPU. Collective; not for timed code."""
        return {name: value.cpu() for name, value in values.items()}

    def communication_buffers(self) -> Iterable[Tensor]:
        """What the exchange between slices holds between steps."""
        return ()

    def facts(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        """Releases what outlives the object."""
