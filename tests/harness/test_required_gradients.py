from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.implementation import Implementation, StepOutput
from harness.required_gradients import require_in_first_step
from harness.workload import Batch, MicroBatch


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, inputs: Tensor, *names: str) -> Tensor:
        hidden: Tensor = self.used(inputs)
        for name in names:
            hidden = hidden + self.get_submodule(name)(inputs)
        return hidden


class Toy(Implementation):
    """Each micro-batch uses the branches that `plan` names."""

    strategy = "toy"

    def __init__(self, *plan: tuple[str, ...], error: Exception | None = None) -> None:
        self.module, self.plan, self.error = Branches(), plan, error
        self.num_updates = 0

    def required_gradients(self) -> Mapping[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.numel()}

    def train_step(self, batch: Batch) -> StepOutput:
        for micro_batch, names in zip(batch.micro_batches, self.plan, strict=True):
            self.module(micro_batch.inputs, *names).sum().backward()
        if self.error is not None:
            raise self.error
        self.num_updates += 1
        return StepOutput(loss_sum=None, num_tokens=0, gradient_norm=None, skipped=False, learning_rates=())

    def full_gradients(self) -> dict[str, Tensor]:
        return {}

    def full_parameters(self) -> dict[str, Tensor]:
        return {}


def batch(num_micro_batches: int) -> Batch:
    inputs = torch.ones(1, 2)
    one = MicroBatch(inputs=inputs, targets=inputs, num_tokens=1, seed=0)
    return Batch(step=0, micro_batches=(one,) * num_micro_batches, global_num_tokens=num_micro_batches)


def watched(*plan: tuple[str, ...], **others: Any) -> Toy:
    toy = Toy(*plan, **others)
    require_in_first_step(toy, "some.library")
    return toy


def num_hooks(toy: Toy) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in toy.module.parameters())


def test_a_step_in_which_any_micro_batch_uses_each_parameter_is_like_any_other() -> None:
    toy = watched(("first",), ("second",))
    for _ in range(2):
        toy.train_step(batch(2))
    assert toy.num_updates == 2
    assert num_hooks(toy) == 0
    assert "train_step" not in vars(toy)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ([("first",), ("first",)], "some.library: second.weight has no gradient in this rank's first step: "),
        ([(), ()], "some.library: first.weight and 1 more have no gradient in this rank's first step: "),
    ],
)
def test_what_no_micro_batch_uses_is_named_before_the_update(plan: list[tuple[str, ...]], words: str) -> None:
    toy = watched(*plan)
    with pytest.raises(RuntimeError, match=f"^{words}the workload must say leaves_parameters_unused=True$"):
        toy.train_step(batch(2))
    assert toy.num_updates == 0
    assert num_hooks(toy) == 0


def test_a_later_step_is_not_looked_at() -> None:
    toy = watched(("first", "second"))
    toy.train_step(batch(1))
    toy.plan = ((),)
    toy.train_step(batch(1))
    assert toy.num_updates == 2


class StopsInBackward(Toy):
    """As a library's own hook may, on its way through its buckets."""

    def train_step(self, batch: Batch) -> StepOutput:
        loss = self.module(batch.micro_batches[0].inputs).sum()
        loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self._stop))
        loss.backward()
        raise AssertionError("not reached")

    def _stop(self) -> None:
        raise AttributeError("'NoneType' object has no attribute 'numel'")


def test_an_error_of_the_librarys_that_comes_first_is_explained_and_kept() -> None:
    toy = StopsInBackward()
    require_in_first_step(toy, "some.library")
    with pytest.raises(RuntimeError, match=r"first.weight and 1 more have no gradient") as raised:
        toy.train_step(batch(1))
    assert isinstance(raised.value.__cause__, AttributeError)


def test_ddps_own_word_about_it_is_explained() -> None:
    toy = watched(("first",), error=RuntimeError("... the keyword argument `find_unused_parameters=True` ..."))
    with pytest.raises(RuntimeError, match=r"^some.library: second.weight has no gradient"):
        toy.train_step(batch(1))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), AssertionError("something else")])
def test_errors_of_another_cause_stay_as_they_are(error: Exception) -> None:
    toy = watched(("first", "second"), error=error)
    with pytest.raises(type(error), match=str(error)):
        toy.train_step(batch(1))
    assert num_hooks(toy) == 0
