"""A step of one rank of data parallelism on tensors without memory: its model's own passes, and the gradients where
they are kept. See harness.implementation.DryStep."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from harness.implementation import DryStep
from harness.parameters import replicated_state_bytes
from harness.workload import Batch
from impls.native.parts.direct_gradients import Place, TrainingTask
from impls.native.parts.rank_model import Passes, RankModel


def dry_step(
    model: RankModel, batch: Batch, *, held_bytes: int | None = None, lent_bytes: int, small_bytes: int, direct: bool
) -> DryStep:
    """As NativeDataParallel takes it with these options. `held_bytes` by itself are the states of all that `model`
    holds; `lent_bytes` come when its passes are over, for the sums and the update."""
    gradients = _Gradients(model, small_bytes=small_bytes)
    task = TrainingTask()
    if direct and gradients.places:
        model.write_directly(gradients.places, task)
    passes = Passes(begin_micro_batch=lambda index: None, end_backward=gradients.gather)

    def take(without_values: Batch) -> None:
        model.forward_backward(without_values, task, passes)
        torch.empty(lent_bytes, dtype=torch.uint8, device=model.device)

    if held_bytes is None:
        training = model.workload.training
        states = replicated_state_bytes(model.parameters, model.workload.precision, training.num_moments)
        held_bytes = sum(states.values())
    held = [*model.module.parameters(), *model.module.buffers(), *gradients.held]
    return DryStep(held_bytes=held_bytes, held=held, batch=batch, take=take)


class _Gradients:
    """Those of large parameters have places, to which they go at once; small ones stay where autograd makes them until
    backward is over."""

    def __init__(self, model: RankModel, *, small_bytes: int) -> None:
        trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        dtype = model.workload.precision.gradient if model.workload.precision.master is not None else None
        self._filled: set[str] = set()
        self._small = []
        self.places: dict[str, Place] = {}
        for name, parameter in trained.items():
            view = torch.empty_like(parameter, dtype=dtype)
            if view.nbytes < small_bytes:
                self._small.append(parameter)
                continue
            self.places[name] = Place(view, partial(self._claim, name))
            parameter.register_post_accumulate_grad_hook(partial(self._take_over, name))

    @property
    def held(self) -> list[Tensor]:
        return [place.view for place in self.places.values()]

    def gather(self) -> None:
        for parameter in self._small:
            parameter.grad = None

    def _take_over(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and not self._claim(name):
            gradient.to(self.places[name].view.dtype)  # an addition converts its operand first

    def _claim(self, name: str) -> bool:
        is_first = name not in self._filled
        self._filled.add(name)
        return is_first
