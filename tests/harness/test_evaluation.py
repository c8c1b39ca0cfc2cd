"""What `evaluating` leaves as it was."""

import pytest
import torch
from torch import Tensor, nn

from harness.evaluation import evaluating


class Careless(nn.Module):
    """Writes to one buffer and puts another tensor in the place of a second, whatever mode it is in."""

    kept: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
        self.register_buffer("kept", torch.tensor([1.0, torch.nan]))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.data += torch.rand(2)
        self.replaced = self.replaced + 1
        output: Tensor = self.layer(x)
        return output


def test_modes_buffers_and_random_numbers_are_as_before() -> None:
    model = Careless()
    model.layer[2].eval()  # frozen statistics beside what trains
    modes = {name: module.training for name, module in model.named_modules()}
    held = dict(model._buffers)
    torch.manual_seed(7)
    right = torch.rand(3)
    torch.manual_seed(7)
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(4, 2)).requires_grad
        raise ZeroDivisionError
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(model._buffers[name] is buffer for name, buffer in held.items())
    assert torch.equal(model.kept.nan_to_num(5.0), torch.tensor([1.0, 5.0]))
    assert torch.equal(model.replaced, torch.zeros(2))
    assert torch.equal(torch.rand(3), right)
    assert torch.is_grad_enabled()


def test_a_forward_that_takes_gradients_is_told_what_an_evaluation_expects() -> None:
    weight = torch.ones(2, requires_grad=True)
    expected = r"without gradients: expected torch\.enable_grad\(\) around .*does not require grad"
    with pytest.raises(RuntimeError, match=expected), evaluating(nn.Linear(1, 1)):
        torch.autograd.grad(weight.sum(), weight)
    with evaluating(nn.Linear(1, 1)), torch.enable_grad():
        assert torch.autograd.grad(weight.sum(), weight)[0].tolist() == [1.0, 1.0]
