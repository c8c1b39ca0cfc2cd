"""One rank's stages of a model that is a chain of blocks, and a step through them (parts/pipeline_executor.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.chain import Border, as_value, holders_of, keep_parameters, run_blocks
from harness.evaluation import evaluating
from harness.implementation import EvaluationOutput, phase
from harness.optimizer import norm_over_ranks
from harness.workload import Batch
from impls.native.parts.direct_gradients import Place, TrainingTask
from impls.native.parts.pipeline_executor import Executor, StageRun
from impls.native.parts.pipeline_messages import Messages
from impls.native.parts.rank_model import Kinds, Passes, RankModel
from impls.native.parts.schedules import Schedule, forwards


class PipelineStages(RankModel):
    """The stages of the pipeline's `rank` of `whole`, stage s on rank s modulo their number; `stages` are the blocks of
    each. Collective over `group`, which takes what is not on the way of a forward or backward; none where nothing is
    asked for between steps. `make_ties` makes the group of those ranks that hold the parameters which several stages
    use.

    Of the model that is built whole only the stages' own parameters stay.
    """

    def __init__(
        self,
        whole: RankModel,
        group: dist.ProcessGroup | None,
        whose: str,
        *,
        rank: int,
        stages: Sequence[range],
        schedule: Schedule,
        make_ties: Callable[[Sequence[int]], dist.ProcessGroup | None],
        messages: Messages,
    ) -> None:
        workload = whole.workload
        assert workload.chain is not None
        super().__init__(workload, whole.device, whose, module=whole.module)
        self._slice = whole
        self._group, self._rank = group, rank
        self._schedule = schedule
        self._actions = schedule.table()[self._rank]
        blocks = list(workload.chain(self.module))
        self._blocks = {
            stage: [blocks[index] for index in of_stage]
            for stage, of_stage in enumerate(stages)
            if stage % schedule.num_ranks == self._rank
        }
        self._last_blocks = [of_stage.stop - 1 for of_stage in stages]
        self._borders: dict[tuple[tuple[int, ...], bool], tuple[Border, ...]] = {}  # by shape, and whether evaluated
        rank_of = [stage % schedule.num_ranks for stage in range(len(stages))]
        holders = holders_of(self.module, blocks, stages, rank_of)
        self._holders = {name: tuple(sorted(ranks)) for name, ranks in holders.items()}
        several = sorted({ranks for ranks in self._holders.values() if len(ranks) > 1})
        self._ties = {ranks: make_ties(ranks) for ranks in several}
        keep_parameters(self.module, {name for name, ranks in holders.items() if self._rank in ranks})
        kept = {name for name, _ in self.module.named_parameters()}
        self.parameters = tuple(parameter for parameter in whole.parameters if parameter.name in kept)
        self._messages = messages

    def kinds(self, name: str) -> Kinds:
        return (*self._slice.kinds(name), self._holders[name])

    def forward_backward(self, batch: Batch, task: TrainingTask, passes: Passes) -> tuple[Tensor | None, int]:
        losses: list[Tensor] = []
        passes.begin_micro_batch(-1)  # nothing is reduced before all are through
        self._executor(task).run(self._actions, self._runs(batch, losses))
        self.kept_views.check()
        passes.end_backward()
        with phase("reduce"):
            passes.reduce(True)
        return _total(losses), batch.num_tokens

    def evaluate(
        self, batch: Batch, forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> EvaluationOutput:
        losses: list[Tensor] = []
        actions = forwards(
            self._rank,
            num_ranks=self._schedule.num_ranks,
            num_stages=self._schedule.num_stages,
            num_micro_batches=len(batch.micro_batches),
        )
        blocks = [block for of_stage in self._blocks.values() for block in of_stage]
        with evaluating(self.module, *blocks), forward():
            self._executor(TrainingTask()).run(actions, self._runs(batch, losses, evaluates=True))
        self.kept_views.check()
        return EvaluationOutput(loss_sum=_total(losses), num_tokens=batch.num_tokens)

    def foresee(self, batch: Batch) -> None:
        """Finds out what crosses borders with micro-batches like these, as a step does when it meets the first of a
        shape."""
        for micro_batch in batch.micro_batches:
            self._borders_of(micro_batch.inputs, evaluates=False)

    def write_directly(self, places: dict[str, Place], task: TrainingTask) -> None:
        self._slice.write_directly(places, task)

    def sum_partial(self, kinds: Kinds, gradients: Tensor) -> None:
        *of_slice, holders = kinds
        self._slice.sum_partial(tuple(of_slice), gradients)
        if holders in self._ties:
            # Ranks come to the sums that they have in common in one order: that of the buckets, of the model's use.
            dist.all_reduce(gradients, group=self._ties[holders])

    def counts(self, kinds: Kinds) -> bool:
        *of_slice, holders = kinds
        assert isinstance(holders, tuple)
        return self._rank == holders[0] and self._slice.counts(tuple(of_slice))

    def norm_over_slices(self, own: Tensor) -> Tensor:
        assert self._group is not None
        return norm_over_ranks(self._slice.norm_over_slices(own).to(self.device), self._group)

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._merged(self._slice.whole(values))

    def whole_buffers(self) -> dict[str, Tensor]:
        own = {id(buffer) for blocks in self._blocks.values() for block in blocks for buffer in block.buffers()}
        here = {name: buffer.cpu() for name, buffer in self.module.named_buffers() if id(buffer) in own}
        return {**super().whole_buffers(), **self._merged(here)}

    def _merged(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of what several ranks tell the first one's."""
        assert self._group is not None
        of_ranks: list[Any] = [None] * self._group.size()
        dist.all_gather_object(of_ranks, dict(own), group=self._group)
        found: dict[str, Tensor] = {}
        for of_rank in of_ranks:
            found |= {name: value for name, value in of_rank.items() if name not in found}
        return found

    def communication_buffers(self) -> Iterable[Tensor]:
        return self._slice.communication_buffers()

    def facts(self) -> Mapping[str, str]:
        return self._slice.facts()

    def close(self) -> None:
        self._slice.close()

    def _executor(self, task: TrainingTask) -> Executor:
        return Executor(
            self._messages,
            task,
            rank=self._rank,
            num_ranks=self._schedule.num_ranks,
            num_stages=self._schedule.num_stages,
        )

    def _runs(self, batch: Batch, losses: list[Tensor], *, evaluates: bool = False) -> dict[int, StageRun]:
        """Each of this rank's stages; the losses of the last stage's micro-batches are put into `losses`."""
        found = [self._borders_of(micro_batch.inputs, evaluates) for micro_batch in batch.micro_batches]
        return {stage: self._run_of(stage, batch, losses, found) for stage in self._blocks}

    def _run_of(
        self, stage: int, batch: Batch, losses: list[Tensor], of_micro_batches: Sequence[tuple[Border, ...]]
    ) -> StageRun:
        is_last = stage == self._schedule.num_stages - 1
        before = [] if not stage else [found[self._last_blocks[stage - 1]] for found in of_micro_batches]
        after = [] if is_last else [found[self._last_blocks[stage]] for found in of_micro_batches]

        def forward(index: int, inputs: list[Tensor]) -> list[Tensor]:
            micro_batch = batch.micro_batches[index]
            self.workload.begin_forward(micro_batch)
            outputs = run_blocks(self._blocks[stage], inputs or [micro_batch.inputs])
            if not is_last:
                return outputs
            loss = self._slice.loss(as_value(outputs), micro_batch.targets)
            losses.append(loss if micro_batch.num_tokens else loss * 0.0)
            return [losses[-1] / batch.global_num_tokens]

        def begin(index: int) -> None:
            self._slice.begin_pass(batch.micro_batches[index].inputs)

        return StageRun(begin=begin, forward=forward, inputs=before, outputs=after)

    def _borders_of(self, inputs: Tensor, evaluates: bool) -> tuple[Border, ...]:
        key = tuple(inputs.shape), evaluates
        if key not in self._borders:
            self._borders[key] = self._slice.borders(inputs, evaluates=evaluates)
        return self._borders[key]


def _total(losses: Sequence[Tensor]) -> Tensor | None:
    """None where the loss does not live."""
    return torch.stack([loss.detach().double() for loss in losses]).sum() if losses else None
