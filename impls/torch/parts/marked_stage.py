"""torch's stage, that marks what it computes for the instruments, and is told before it goes forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from harness.pipeline_marks import pipeline_action


class MarkedStage(PipelineStage):
    """`begin` is told the micro-batch. A forward of the last stage ends with the loss, for which the schedule asks
    next: `end_of_loss` tells of that."""

    begin: Callable[[int], None]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._forward = self._mark("F", fwd_chunk_id)
        self._forward.__enter__()
        self.begin(fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self.end_of_loss()
        return output

    def end_of_loss(self) -> None:
        self._forward.__exit__(None, None, None)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._mark("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._mark("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _mark(self, kind: str, micro_batch: int) -> AbstractContextManager[Any]:
        return pipeline_action(f"{self.stage_index}{kind}{micro_batch}", self._in_flight)

    def _in_flight(self) -> int:
        """Of how many micro-batches the stage holds what a backward still needs."""
        return len(self.fwd_cache) + len(self.backward_state)
