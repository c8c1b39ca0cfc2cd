from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from harness import models
from harness.datasets import Tensors
from harness.models.awkward import KINDS
from harness.parameters import logical_parameters
from harness.workload import Workload
from impls.native.parts.units import UnitPlan, plan_units

WIDTH = 4
Blocks = Callable[[nn.Module], Sequence[nn.Module]]
Way = Callable[[Any, Tensor], Tensor]


def layers(model: Any) -> list[nn.Module]:
    return list(model.layers)


def workload_of(model: Callable[[], nn.Module], blocks: Blocks = layers) -> Workload:
    dataset = Tensors(torch.zeros(16, 3, WIDTH), torch.zeros(16, 1))
    return Workload(name="units", model=model, dataset=dataset, blocks=blocks)


def names_by_unit(plan: UnitPlan) -> dict[str | None, list[str]]:
    return {unit.module: [parameter.name for parameter in unit.parameters] for unit in plan.units}


def traced(model: Callable[[], nn.Module], blocks: Blocks = layers) -> dict[str | None, list[str]]:
    plan = plan_units(workload_of(model, blocks), 2)
    assert plan.untraced_because is None
    return names_by_unit(plan)


def shift() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH))


class Layer(nn.Module):
    """Adds its shift, and whatever else it is given; keeps a view of its shift."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = shift()

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        self.kept = [self.shift.view(2, 2)]
        return sum(given, x + self.shift)


def in_turn(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


class Chain(nn.Module):
    """A stem, then the layers on their way, then a head: registered in another order than they are used in."""

    def __init__(self, *given: nn.Module, way: Way = in_turn) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(given or (Layer(), Layer()))
        self.head, self.stem = nn.Linear(WIDTH, 2, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.way = way

    def forward(self, x: Tensor) -> Any:
        return self.head(self.way(self, self.stem(x)))


SECOND = {"layers.1": ["layers.1.shift"]}
AS_PLAIN = {None: ["stem.weight", "head.weight"], "layers.0": ["layers.0.shift"], **SECOND}
FIRST_IN_ROOT = {None: ["stem.weight", "layers.0.shift", "head.weight"], **SECOND}


def test_a_block_keeps_what_only_it_uses_in_order_of_use() -> None:
    assert traced(Chain) == AS_PLAIN


def test_blocks_come_in_the_order_in_which_they_are_entered() -> None:
    units = traced(lambda: Chain(way=lambda model, x: model.layers[0](model.layers[1](x))))
    assert list(units) == [None, "layers.1", "layers.0"]


class Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        return x + shift

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def scripted(x: Tensor, shift: Tensor) -> Tensor:
    with pytest.warns(DeprecationWarning):
        return torch.jit.script(add)(x, shift)


def add(x: Tensor, shift: Tensor) -> Tensor:
    return x + shift.clone()


OUTSIDE: dict[str, Way] = {
    "a head tied by a function": lambda model, x: linear(in_turn(model, x), weight=model.layers[0].shift.diag()),
    "in a list": lambda model, x: in_turn(model, x) + torch.stack([model.layers[0].shift, x[0, 0]]).sum(),
    "through parameters()": lambda model, x: in_turn(model, x) * sum(p.norm() for p in model.layers[0].parameters()),
    "its shape": lambda model, x: in_turn(model, x)[..., : model.layers[0].shift.shape[0]],
    "another block's argument": lambda model, x: model.layers[1](model.layers[0](x), model.layers[0].shift),
    "its own argument, changed": lambda model, x: in_turn(model, model.layers[0](x, model.layers[0].shift * 2)),
    "a view that it kept": lambda model, x: in_turn(model, x) + model.layers[0].kept[0].sum(),
    "the block's forward, without its hooks": lambda model, x: in_turn(model, x) + model.layers[0].forward(x),
    "an autograd function": lambda model, x: Adds.apply(in_turn(model, x), model.layers[0].shift),
    "a script, out of Python's sight": lambda model, x: scripted(in_turn(model, x), model.layers[0].shift),
    "the block a second time": lambda model, x: in_turn(model, model.layers[0](x)),
}


@pytest.mark.parametrize("way", OUTSIDE.values(), ids=OUTSIDE)
def test_what_is_used_outside_its_block_or_twice_goes_to_the_root(way: Way) -> None:
    assert traced(lambda: Chain(way=way)) == FIRST_IN_ROOT


def test_what_the_model_returns_is_used_outside() -> None:
    class Returns(Chain):
        def forward(self, x: Tensor) -> Any:
            return {"output": super().forward(x), "penalties": [self.layers[0].shift]}

    assert traced(Returns) == FIRST_IN_ROOT


def test_a_tie_between_blocks_goes_to_the_root() -> None:
    def tied() -> nn.Module:
        model = Chain(Layer(), Layer(), Layer())
        model.layers[1].shift, model.layers[1].own = model.layers[0].shift, shift()
        return model

    # What the second alone holds is not reached, but the block is entered.
    own = {"layers.1": ["layers.1.own"], "layers.2": ["layers.2.shift"]}
    assert traced(tied) == {None: FIRST_IN_ROOT[None], **own}


def test_a_tie_with_a_module_that_nobody_calls_goes_to_the_root() -> None:
    def tied() -> nn.Module:
        model = Chain()
        model.never = Layer()
        model.never.shift = model.layers[0].shift
        return model

    assert traced(tied) == FIRST_IN_ROOT


def test_a_module_that_two_blocks_share_goes_to_the_root() -> None:
    def shared() -> nn.Module:
        both = Layer()
        return Chain(nn.Sequential(both, nn.RMSNorm(WIDTH)), nn.Sequential(nn.RMSNorm(WIDTH), both))

    own = {"layers.0": ["layers.0.1.weight"], "layers.1": ["layers.1.0.weight"]}
    assert traced(shared) == {None: ["stem.weight", "layers.0.0.shift", "head.weight"], **own}


class Partly(Layer):
    """Has parameters that it does not use, and a frozen one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.absent, self.frozen = nn.Linear(1, 1, bias=False), shift().requires_grad_(False)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return super().forward(x) * self.frozen


def test_what_forward_does_not_reach_stays_with_its_block() -> None:
    units = traced(lambda: Chain(Partly(), Layer()))
    assert units["layers.0"] == ["layers.0.shift", "layers.0.frozen", "layers.0.absent.weight"]


def test_all_of_a_block_that_is_called_twice_goes_to_the_root() -> None:
    units = traced(lambda: Chain(Partly(), Layer(), way=OUTSIDE["the block a second time"]))
    reached = ["stem.weight", "layers.0.shift", "layers.0.frozen", "head.weight"]
    assert units == {None: [*reached, "layers.0.absent.weight"], **SECOND}


def test_a_block_that_nobody_calls_goes_to_the_root() -> None:
    units = traced(lambda: Chain(way=lambda model, x: model.layers[1](x)))
    assert units == {None: ["stem.weight", "head.weight", "layers.0.shift"], **SECOND}


def test_a_block_that_fails_and_is_caught_is_left() -> None:
    class Fails(Layer):
        def forward(self, x: Tensor, *given: Tensor) -> Tensor:
            raise KeyError(str((x + self.shift).shape))

    def around(model: Any, x: Tensor) -> Tensor:
        with pytest.raises(KeyError):
            model.layers[0](x)
        return model.layers[1](x)

    assert traced(lambda: Chain(Fails(), Layer(), way=around)) == AS_PLAIN


def test_of_blocks_in_blocks_only_the_outermost_count() -> None:
    def blocks(model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, Layer | nn.Sequential)]

    units = traced(lambda: Chain(nn.Sequential(Layer(), Layer()), Layer()), blocks)
    assert units == {**AS_PLAIN, "layers.0": ["layers.0.0.shift", "layers.0.1.shift"]}


def test_a_block_that_another_calls_without_holding_it_goes_to_the_root() -> None:
    class Calls(Layer):
        def forward(self, x: Tensor, *given: Tensor) -> Tensor:
            return self.other[0](super().forward(x))

    def nested() -> nn.Module:
        model = Chain(Calls(), Layer(), way=lambda model, x: model.layers[0](x))
        model.layers[0].other = (model.layers[1],)  # a tuple does not register it
        return model

    root = ["stem.weight", "layers.1.shift", "head.weight"]
    assert traced(nested) == {None: root, "layers.0": ["layers.0.shift"]}


@pytest.mark.parametrize("blocks", [lambda model: [model], lambda model: list(model.modules()), lambda model: []])
def test_the_model_as_its_own_block_or_no_block_is_just_the_root(blocks: Blocks) -> None:
    assert traced(Chain, blocks) == {None: ["stem.weight", "layers.0.shift", "layers.1.shift", "head.weight"]}


def test_units_without_parameters_are_left_out() -> None:
    units = traced(lambda: nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh(), nn.Linear(2, 2, bias=False)), blocks=list)
    assert units == {"0": ["0.weight", "0.bias"], "2": ["2.weight"]}
    assert plan_units(workload_of(nn.Tanh, blocks=lambda model: []), 2) == UnitPlan(units=())


class Attends(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


class Remembers(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([shift(), shift()])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack(list(self.shifts)[::-1]).sum(0)


def test_modules_that_hand_their_parameters_to_one_function_keep_them() -> None:
    def model() -> nn.Module:
        return Chain(Attends(WIDTH, 2), Remembers(WIDTH, WIDTH), Lists(), nn.TransformerEncoderLayer(WIDTH, 2, 8))

    units = traced(model)
    assert units[None] == ["stem.weight", "head.weight"]
    assert units["layers.2"] == ["layers.2.shifts.1", "layers.2.shifts.0"]
    # Two weights and biases; the same for input and hidden; two shifts; attention, two linears, two norms.
    assert [len(units[f"layers.{index}"]) for index in range(4)] == [4, 4, 2, 12]


def test_what_a_hook_of_the_block_itself_uses_belongs_to_it() -> None:
    """Weight norm's was there before that of the trace."""

    def normed() -> nn.Module:
        with pytest.warns(FutureWarning):
            return Chain(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)))

    assert set(traced(normed)["layers.0"]) == {"layers.0.weight_g", "layers.0.weight_v", "layers.0.bias"}


def test_a_model_that_reads_values_is_one_unit_and_says_so() -> None:
    plan = plan_units(workload_of(lambda: Chain(way=lambda model, x: x if x.sum() > 0 else in_turn(model, x))), 2)
    assert names_by_unit(plan) == {None: ["layers.0.shift", "layers.1.shift", "head.weight", "stem.weight"]}
    assert plan.untraced_because == "RuntimeError: Tensor.item() cannot be called on meta tensors"


def test_a_model_that_is_built_from_values_is_one_unit_and_leaves_the_random_numbers_alone() -> None:
    class Built(Chain):
        def __init__(self) -> None:
            super().__init__()
            assert self.stem.weight.isfinite().all()

    before = torch.get_rng_state()
    plan = plan_units(workload_of(Built), 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert names_by_unit(plan) == {None: ["layers.0.shift", "layers.1.shift", "head.weight", "stem.weight"]}
    assert plan.untraced_because == "RuntimeError: Tensor.item() cannot be called on meta tensors"


def test_blocks_outside_the_model_are_refused() -> None:
    expected = "workload units: expected blocks that are modules inside the model, got a Layer that is not"
    with pytest.raises(ValueError, match=f"^{expected}$"):
        plan_units(workload_of(Chain, blocks=lambda model: [*layers(model), Layer()]), 2)


READ_VALUES = {"awkward:kind=reused", "awkward:kind=rank_dependent", "awkward:kind=sometimes_unused"}
BUILT_IN = [*(f"awkward:kind={kind}" for kind in KINDS), "gpt", "llama", "convnet"]


@pytest.mark.parametrize("text", BUILT_IN)
def test_built_in_workloads_have_every_parameter_once(text: str) -> None:
    if text == "llama":
        pytest.importorskip("transformers")
    workload = models.load(text)
    plan = plan_units(workload, 2)
    expected = logical_parameters(workload.build_model(), workload.decays)
    found = [parameter for unit in plan.units for parameter in unit.parameters]
    assert sorted(found, key=lambda p: p.name) == sorted(expected, key=lambda p: p.name)
    assert (plan.untraced_because is not None) == (text in READ_VALUES)


def sizes(text: str) -> dict[str | None, int]:
    units = plan_units(models.load(text), 2).units
    return {unit.module: sum(parameter.num_elements for parameter in unit.parameters) for unit in units}


def test_gpts_children_are_a_unit_each_and_a_tied_vocabulary_is_the_root() -> None:
    width, block = 32, 12 * 32**2 + 13 * 32
    expected = {"embedding": (256 + 16) * width, "block0": block, "block1": block, "head": (2 + 256) * width}
    assert sizes("gpt:size=tiny") == expected
    tied = {None: 256 * width, **expected, "embedding": 16 * width, "head": 2 * width}
    assert sizes("gpt:size=tiny,tied=true") == tied


class Descending(nn.Module):
    """Each block uses its weight within a function transform."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        for layer in self.layers:
            layer.forward = lambda x, w=layer.weight: x - torch.func.grad(lambda y: linear(y, w).square().sum())(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_function_transforms_are_seen_through_and_named() -> None:
    plan = plan_units(workload_of(Descending), 2)
    assert plan.transforms_functions
    assert names_by_unit(plan) == {f"layers.{index}": [f"layers.{index}.weight"] for index in range(3)}


def test_each_call_of_a_norm_knows_how_many_units_come_before_it() -> None:
    """A norm without parameters is a block, but no unit."""

    def normed() -> nn.Module:
        norms = nn.BatchNorm1d(3, affine=False), nn.Sequential(Layer(), nn.BatchNorm1d(3))
        return Chain(Layer(), *norms, way=ends_with_the_first)

    def ends_with_the_first(model: Any, x: Tensor) -> Tensor:
        return model.layers[1](in_turn(model, x))

    plan = plan_units(workload_of(normed), 2)
    assert [unit.module for unit in plan.units] == [None, "layers.0", "layers.2"]
    assert plan.of_norms == (1, 2, 2)
