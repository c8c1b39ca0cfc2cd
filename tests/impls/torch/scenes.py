"""torch.ddp as it is, with eyes in it: a rank fails where it is not as it must be."""

# Annotations stay objects here: DDP compares those of a communication hook with its own.
from typing import Any

import torch
import torch.distributed as dist

from harness.implementation import StepOutput
from harness.workload import Batch
from impls.torch.ddp import TorchDataParallel


class Searching(TorchDataParallel):
    """Whether DDP searches its graph for unused parameters."""

    def __init__(self, *arguments: Any, expected_search: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.wrapped.find_unused_parameters is expected_search


class Exchanging(TorchDataParallel):
    """Counts what its buckets exchange, by a communication hook: nothing before the last micro-batch."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_exchanges = 0
        self.wrapped.register_comm_hook(None, self._exchange)

    def train_step(self, batch: Batch) -> StepOutput:
        self._num_exchanges, forwards = 0, []
        hook = self.module.register_forward_pre_hook(lambda *_: forwards.append(self._num_exchanges))
        output = super().train_step(batch)
        hook.remove()
        assert forwards == [0, 0, 0, 0], forwards
        assert self._num_exchanges == 1, f"one bucket, {self._num_exchanges} exchanges"
        return output

    def _exchange(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._num_exchanges += 1
        buffer = bucket.buffer().div_(self.data_degree)
        work = dist.all_reduce(buffer, group=self.wrapped.process_group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])
