"""native.ddp as it is, with eyes in it: each class looks at one moment of a step and fails the rank if it is not as it
must be. All of them train rightly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.implementation import StepOutput
from harness.workload import Batch
from impls.native.ddp import NativeDataParallel


class WeightsWait(NativeDataParallel):
    """Until the update begins, nothing has touched the weights; then every one of them moves."""

    def train_step(self, batch: Batch) -> StepOutput:
        self._before = {name: p.detach().clone() for name, p in self.parameters.items()}
        output = super().train_step(batch)
        for name, parameter in self.parameters.items():
            assert not torch.equal(parameter, self._before[name]), f"{name} did not move"
        return output

    def _step(self, learning_rate: float) -> tuple[Tensor | None, bool]:
        for name, parameter in self.parameters.items():
            assert torch.equal(parameter, self._before[name]), f"{name} moved before the update"
            assert parameter.grad is None, f"{name} keeps a gradient beside its bucket's"
        return super()._step(learning_rate)


class OverlapsBackward(NativeDataParallel):
    """Sums start during the last backward, in bucket order, all but the last bucket's before its first layer is done,
    and none during an earlier micro-batch's."""

    def train_step(self, batch: Batch) -> StepOutput:
        started: list[tuple[int, bool]] = []
        start = self.sums.start

        def watched(index: int) -> None:
            started.append((index, self._is_last_micro_batch))
            start(index)

        self.sums.start = watched  # type: ignore[method-assign]
        seen_in_forward: list[int] = []
        hook = self.module.register_forward_pre_hook(lambda *_: seen_in_forward.append(len(started)))
        output = super().train_step(batch)
        hook.remove()
        self.sums.start = start  # type: ignore[method-assign]
        assert len(batch.micro_batches) > 1
        assert seen_in_forward == [0] * len(batch.micro_batches)
        assert started == [(index, True) for index in range(len(self.buckets))], started
        assert len(self.buckets) > 2
        return output


class StrayBackward(NativeDataParallel):
    """A backward outside of a step either raises, as it must where a bucket looks out for its gradients, or leaves no
    trace in the next step."""

    def train_step(self, batch: Batch) -> StepOutput:
        stray = batch.micro_batches[0].inputs
        if self.num_updates == 0:
            self.module(stray).sum().backward()
            return super().train_step(batch)
        try:
            self.module(stray).sum().backward()
        except RuntimeError as error:
            assert "got a further gradient after its bucket's reduction had begun" in str(error), error
        else:
            assert len(self.buckets) == 1, "a backward after a step was taken in"
            assert all(parameter.grad is not None for parameter in self.parameters.values())
        return super().train_step(batch)


class NobodyLooks(NativeDataParallel):
    """Small gradients of the last bucket stay where autograd makes them until backward is over, unseen by Python; then
    none of them is left there."""

    def train_step(self, batch: Batch) -> StepOutput:
        assert all(parameter._post_accumulate_grad_hooks is None for parameter in self.parameters.values())
        started_with: list[bool] = []
        start = self.sums.start

        def watched(index: int) -> None:
            started_with.extend(parameter.grad is None for parameter in self.parameters.values())
            start(index)

        self.sums.start = watched  # type: ignore[method-assign]
        output = super().train_step(batch)
        self.sums.start = start  # type: ignore[method-assign]
        assert len(batch.micro_batches) > 1
        assert started_with
        assert all(started_with)
        return output


class StepsAgainAfterLooking(NativeDataParallel):
    """Looking at gradients and parameters between steps, as often as one likes, changes nothing."""

    def train_step(self, batch: Batch) -> StepOutput:
        output = super().train_step(batch)
        first, again = self.full_gradients(), self.full_gradients()
        assert first.keys() == again.keys() == {name for name, p in self.parameters.items() if p.requires_grad}
        assert all(torch.equal(first[name], again[name]) for name in first)
        first["embedding.token.weight"].fill_(torch.nan)  # a copy: nobody else's
        self.full_parameters()["embedding.token.weight"].fill_(torch.nan)
        return output


class InOrderOfUse(NativeDataParallel):
    """Buckets hold the parameters in reverse order of use."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        layers = [s.parameter.name.split(".")[0] for bucket in self.buckets for s in bucket.plan.segments]
        if len(self.buckets) > 1:
            assert list(dict.fromkeys(layers)) == ["last", "middle", "first"], layers
        assert len(layers) == 6
