from __future__ import annotations

import torch
from torch import Tensor, nn

from impls.native.parts.order_of_use import order_of_use


class Backwards(nn.Module):
    """Registered first, used last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.first = nn.Linear(3, 4)
        self.never = nn.Linear(1, 1)
        self.num_calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.last(self.first(x))


def test_order_is_that_of_the_forward_pass_and_the_rest_follows() -> None:
    model = Backwards()
    assert order_of_use(model, torch.randn(2, 3)) == [
        *("first.weight", "first.bias", "last.weight", "last.bias"),
        *("never.weight", "never.bias"),
    ]


def test_finding_it_changes_nothing() -> None:
    model = Backwards()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    order_of_use(nn.Sequential(model, nn.Dropout()), torch.randn(2, 3, generator=torch.Generator()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_tied_parameter_stands_where_it_is_first_used_under_its_first_name() -> None:
    model = Backwards()
    middle = nn.Linear(2, 4, bias=False)
    model.last.register_parameter("alias", middle.weight)
    chain = nn.Sequential(middle, nn.Linear(4, 3), model)
    chain = nn.ModuleDict({"named_first": model, "used_first": nn.Sequential(middle, nn.Linear(4, 3))})
    chain.forward = lambda x: model(chain["used_first"](x))  # type: ignore[method-assign]
    order = order_of_use(chain, torch.randn(5, 2))
    assert order[:3] == ["named_first.last.alias", "used_first.1.weight", "used_first.1.bias"]
    assert len(order) == len(set(order)) == len(list(chain.parameters()))


def test_a_model_that_reads_values_keeps_registration_order() -> None:
    class Reads(Backwards):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) > 0 else x

    model = Reads()
    assert order_of_use(model, torch.randn(2, 3)) == [name for name, _ in model.named_parameters()]
