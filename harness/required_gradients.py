"""Parameters that get no gradient although the workload does not say so: found in the first step, and told by name.

A library that takes a gradient of every parameter for granted leaves its reductions unfinished without one, steps by
zeros, or stops somewhere else with a word about its own buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.autograd import Variable

from harness.implementation import Implementation, StepOutput
from harness.workload import Batch


def require_in_first_step(implementation: Implementation, whose: str) -> None:
    """Has the first step that `implementation` takes end in a RuntimeError where one of its `required_gradients` is
    missing, as soon as the last backward is over. Later steps carry nothing of this."""
    watch = _Watch(whose, implementation.required_gradients())
    take = implementation.train_step

    def train_step(batch: Batch) -> StepOutput:
        del implementation.train_step
        return watch.over(take, batch)

    implementation.train_step = train_step  # type: ignore[method-assign]


class _Watch:
    def __init__(self, whose: str, parameters: Mapping[str, nn.Parameter]) -> None:
        self._whose = whose
        self._watched = {name: p for name, p in parameters.items() if p.requires_grad}
        self._missing = dict.fromkeys(self._watched)
        self._num_backwards = 0
        self._is_in_backward = False

    def over(self, take: Callable[[Batch], StepOutput], batch: Batch) -> StepOutput:
        self._num_backwards = len(batch.micro_batches)
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._come, name))
            for name, parameter in self._watched.items()
        ]
        try:
            output = take(batch)
        except RuntimeError as error:  # this one's own, or of memory, of peers that are gone, of the model itself
            if self._missing and "find_unused_parameters" in str(error):  # DDP's, in the micro-batch after
                raise self._complaint() from error
            raise
        except Exception as error:
            if 0 < len(self._missing) < len(self._watched):
                raise self._complaint() from error
            raise
        finally:
            for handle in handles:
                handle.remove()
        if self._missing:
            raise self._complaint()
        return output

    def _come(self, name: str, _: Tensor) -> None:
        self._missing.pop(name, None)
        if not self._is_in_backward:
            self._is_in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_in_backward = False
        self._num_backwards -= 1
        if not self._num_backwards and self._missing:
            raise self._complaint()

    def _complaint(self) -> RuntimeError:
        first, *others = self._missing
        told = f"{first} and {len(others)} more have" if others else f"{first} has"
        return RuntimeError(
            f"{self._whose}: {told} no gradient in this rank's first step: the workload must say "
            f"leaves_parameters_unused=True"
        )
