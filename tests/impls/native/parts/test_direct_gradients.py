"""Gradients that layers write themselves, held against autograd's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from impls.native.parts.direct_gradients import Place, TrainingTask, write_directly


class AnyTask(TrainingTask):
    """Every backward pass trains, but for one that will be differentiated again."""

    def is_running(self) -> bool:
        return not torch.is_grad_enabled()


class Places:
    """Where the gradients of a model go, and who wrote them: as data parallel keeps them."""

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.views = {name: torch.full_like(p, torch.nan, dtype=dtype).detach() for name, p in trained.items()}
        self.written: list[str] = []
        self.left_to_autograd: set[str] = set()
        self.announced: list[str] = []
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(partial(self._announced, name))
        places = {name: Place(view, partial(self._claim, name)) for name, view in self.views.items()}
        write_directly(model, places, AnyTask())

    def clear(self) -> None:
        self.written.clear()

    def _claim(self, name: str) -> bool:
        self.written.append(name)
        return self.written.count(name) == 1

    def _announced(self, name: str, parameter: Tensor) -> None:
        self.announced.append(name)
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self.left_to_autograd.add(name)
            view = self.views[name]
            view.copy_(gradient) if self._claim(name) else view.add_(gradient)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Tanh(), nn.Linear(4, 6))
    model[2].weight = model[0].weight
    return model


def reused() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(nn.Embedding(6, 4), layer, nn.Tanh(), layer, layer)


class UsedOutside(nn.Module):
    """A weight that its layer uses, and others beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.linear(self.layer(self.embedding(tokens)), self.layer.weight) + self.embedding.weight[1]
        return nn.functional.linear(x, self.layer.weight, self.layer.bias)


def checkpointed() -> nn.Module:
    model = reused()
    model.forward = partial(checkpoint, model.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def half_frozen(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 5), nn.Linear(5, 3))
    getattr(model[1], kind).requires_grad_(False)
    return model


def without_outputs() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # there is nothing to initialise
        return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 0), nn.Linear(0, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)),
    "tied": tied,
    "reused": reused,
    "used outside": UsedOutside,
    "checkpointed": checkpointed,
    "frozen weight": lambda: half_frozen("weight"),
    "frozen bias": lambda: half_frozen("bias"),
    "no outputs": without_outputs,
}


def loss_of(outputs: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    return (outputs * weights).square().sum()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shape", [(), (7,), (2, 7), (2, 3, 5), (0, 7)], ids=str)
def test_equals_autograd_over_several_micro_batches(kind: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    micro_batches = [torch.randint(6, shape) for _ in range(3)]
    for tokens in micro_batches:
        loss_of(model(tokens)).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    places = Places(model)
    for _ in range(2):  # the second step overwrites what the first one left
        places.clear()
        for tokens in micro_batches:
            loss_of(model(tokens)).backward()
    assert set(places.written) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(places.views[name], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("plain", set()),
        ("tied", set()),
        ("reused", set()),
        ("used outside", {"embedding.weight", "layer.weight", "layer.bias"}),
        ("frozen weight", {"1.bias"}),
        ("frozen bias", set()),
        ("no outputs", {"1.weight", "1.bias", "2.weight", "2.bias"}),
    ],
)
def test_autograd_makes_only_what_no_layer_writes(kind: str, left: set[str]) -> None:
    model = MODELS[kind]()
    places = Places(model)
    loss_of(model(torch.randint(6, (2, 7)))).backward()
    assert places.left_to_autograd == left


def test_a_parameter_is_announced_when_its_last_use_is_done_and_before_the_next_layer() -> None:
    model = reused()
    places = Places(model)
    events: list[str] = []
    model[0].weight.register_hook(lambda gradient: events.append("unreached"))  # served: autograd makes none
    model(torch.randint(6, (3,))).sum().backward()
    assert places.announced[-1] == "0.weight"
    assert sorted(places.announced) == ["0.weight", "1.bias", "1.weight"]
    assert places.written.count("1.weight") == 3


@pytest.mark.parametrize("spoil", ["subclass", "patched", "padding", "max_norm", "strided", "dtype"])
def test_layers_that_do_more_than_the_plain_operation_are_left_alone(spoil: str) -> None:
    class Scaled(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * 2

    linear, embedding = nn.Linear(4, 4), nn.Embedding(6, 4)
    dtype = None
    if spoil == "subclass":
        linear = Scaled(4, 4)
    elif spoil == "patched":
        linear.forward = partial(nn.Linear.forward, linear)  # type: ignore[method-assign]
    elif spoil == "padding":
        embedding = nn.Embedding(6, 4, padding_idx=0)
    elif spoil == "max_norm":
        embedding = nn.Embedding(6, 4, max_norm=0.5)
    elif spoil == "strided":
        linear.weight = nn.Parameter(torch.randn(4, 4).t())
    elif spoil == "dtype":
        dtype = torch.float64
    before = (linear.forward, embedding.forward)
    Places(nn.Sequential(embedding, linear), dtype=dtype)
    assert linear.forward == before[0] or spoil in ("padding", "max_norm")
    assert embedding.forward == before[1] or spoil not in ("padding", "max_norm", "dtype")


def test_hooks_of_the_layer_still_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    Places(model)
    seen: list[str] = []
    model[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[1].register_forward_hook(lambda *_: seen.append("after"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    model(torch.randn(3, 4)).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_without_gradients_nothing_is_written() -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))
    tokens = torch.randint(6, (3,))
    expected = model(tokens)
    places = Places(model)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens), expected)
    assert not places.written


def test_gradients_of_the_inputs_are_autograds() -> None:
    layer = nn.Linear(4, 3).double()
    inputs = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    loss_of(layer(inputs)).backward()
    expected, inputs.grad = inputs.grad, None
    layer.zero_grad()
    Places(layer)
    loss_of(layer(inputs)).backward()
    assert expected is not None
    torch.testing.assert_close(inputs.grad, expected, rtol=1e-12, atol=0)


def test_a_gradient_that_is_one_number_expanded_is_taken_as_all_its_elements() -> None:
    layer = nn.Linear(4, 3).double()
    places = Places(layer)
    inputs = torch.randn(5, 4, dtype=torch.float64)
    layer(inputs).sum().backward()
    torch.testing.assert_close(places.views["weight"], inputs.sum(0).expand(3, 4))
    assert places.views["bias"].tolist() == [5.0] * 3


def test_autocast_casts_as_it_would_without() -> None:
    layer = nn.Linear(4, 3)
    places = Places(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(torch.ones(2, 4))
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    assert places.views["weight"].tolist() == [[2.0] * 4] * 3


def test_a_second_derivative_is_autograds() -> None:
    layer, inputs = nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True)

    def second_derivative() -> Tensor:
        (slope,) = torch.autograd.grad(layer(inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), layer.weight)[0]

    expected = second_derivative()
    write_directly(layer, {"weight": Place(torch.zeros(3, 4), lambda: True)}, TrainingTask())
    torch.testing.assert_close(second_derivative(), expected)


def test_a_hook_on_a_weight_sees_its_gradient() -> None:
    layer = nn.Linear(4, 3)
    places = Places(layer)
    seen: list[Tensor] = []
    layer.weight.register_hook(seen.append)
    layer(torch.randn(2, 4)).sum().backward()
    assert torch.equal(seen[0], places.views["weight"])


def test_only_the_backward_pass_from_the_loss_writes() -> None:
    layer, task, inputs = nn.Linear(4, 3), TrainingTask(), torch.randn(2, 4, requires_grad=True)
    view = torch.full((3, 4), torch.nan)
    write_directly(layer, {"weight": Place(view, lambda: True)}, task)
    torch.autograd.grad(layer(inputs).sum(), inputs)
    assert view.isnan().all()
    loss = layer(inputs).sum()
    task.starts_at(loss)
    loss.backward()
    torch.testing.assert_close(view, inputs.detach().sum(0).expand(3, 4))
