from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.datasets import Tensors
from harness.parameters import logical_parameters
from harness.workload import Workload
from impls.native.parts.order_of_use import _traced, in_order_of_use


class Backwards(nn.Module):
    """Registered first, used last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.first = nn.Linear(3, 4)
        self.never = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x))
        return output


class Tied(nn.Module):
    """One weight under two names, used first under the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.middle, self.embedding = nn.Linear(3, 5, bias=False), nn.Linear(3, 3), nn.Embedding(5, 3)
        self.embedding.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.middle(self.embedding(tokens)))
        return output


def traced(model: Callable[[], nn.Module], inputs: Tensor) -> list[str]:
    workload = Workload(name="order", model=model, dataset=Tensors(torch.zeros(2, 1), torch.zeros(2, 1)))
    return _traced(workload, inputs)


def test_order_is_that_of_the_forward_pass() -> None:
    order = traced(Backwards, torch.randn(2, 3))
    assert order == ["first.weight", "first.bias", "last.weight", "last.bias"]


def test_a_tied_parameter_stands_where_it_is_first_used_under_its_first_name() -> None:
    assert traced(Tied, torch.tensor([1, 2])) == ["head.weight", "middle.weight", "middle.bias"]


class Sliced(nn.Module):
    """Uses the weight of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position, self.head = nn.Embedding(5, 3), nn.Embedding(4, 3), nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.token(tokens) + self.position.weight[: tokens.shape[0]])
        return output


def test_a_weight_is_used_where_it_is_touched_though_its_layer_is_not_called() -> None:
    order = traced(Sliced, torch.tensor([1, 2]))
    assert order == ["token.weight", "position.weight", "head.weight", "head.bias"]


def test_what_no_forward_reaches_comes_first() -> None:
    """The last bucket takes it: the others need not wait for it."""
    workload = Workload(name="order", model=Backwards, dataset=Tensors(torch.zeros(2, 3), torch.zeros(2, 2)))
    parameters = logical_parameters(Backwards())
    assert [parameter.name for parameter in in_order_of_use(workload, 1, parameters)] == [
        *("never.weight", "never.bias", "first.weight", "first.bias", "last.weight", "last.bias")
    ]


def test_a_model_that_reads_values_cannot_be_traced() -> None:
    class Reads(Backwards):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) > 0 else x

    with pytest.raises(RuntimeError):
        traced(Reads, torch.randn(2, 3))
