"""What a region of a tensor plan may hold beside its cut layers."""

import pytest
import torch
from torch import Tensor, nn

from harness import models
from harness.tensor_plan import ColumnParallel, RowParallel, TensorPlan, resolve
from harness.tensor_regions import NoRegion, check_regions

PLAN = {"*up": ColumnParallel(), "*down": RowParallel()}
GATED = PLAN | {"*gate": ColumnParallel()}


class Perceptron(nn.Module):
    """With a gain on what lies between the cut layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.gain = nn.Parameter(torch.ones(8))

    def between(self, x: Tensor) -> Tensor:
        return self.up(x).tanh() * (self.gain + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(x))


class Normed(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class GainOnSum(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Gated(Perceptron):
    def between(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid() * super().between(x)


class Residual(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Passing(Gated):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


class Mixed(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * x.mean())


class OtherInput(Gated):
    def between(self, x: Tensor) -> Tensor:
        return self.gate(torch.ones(2, 4)) * super().between(x)


class LooksAtValues(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.second_up, self.second_down = (nn.Linear(4, 4) for _ in range(4))


def check(kind: type[nn.Module], plan: TensorPlan) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), kind())
    check_regions(model, resolve(model, plan), torch.ones(2, 4))


@pytest.mark.parametrize(("kind", "plan"), [(Perceptron, PLAN), (Gated, GATED)])
def test_what_works_on_slices_may_lie_between_the_cut_layers(kind: type[nn.Module], plan: TensorPlan) -> None:
    check(kind, plan)


@pytest.mark.parametrize("workload", ["gpt:size=tiny", "llama:size=tiny,tied=true", "awkward:kind=gqa"])
def test_the_plans_of_our_models_hold(workload: str) -> None:
    assert models.load(workload).fits_tensor_degree(2) is None


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        (Normed, PLAN, r"1\.norm\.bias lies beside cut layers and works outside their slices"),
        (GainOnSum, PLAN, r"1\.scale lies beside cut layers and works outside their slices"),
        (Mixed, PLAN, "1 mixes what is whole with slices of column-parallel layers"),
        (Residual, GATED, "1 adds its input to what its row-parallel layer yields"),
        (Passing, GATED, "1 yields its input beside what its row-parallel layer yields"),
        (OtherInput, GATED, r"1\.gate takes something else than its region's input, which 1 is called with first"),
        (LooksAtValues, PLAN, r"1\.gain .* cannot be seen: the model does not run without values"),
        (Pairs, PLAN, r"1\.down and 1\.second_down are row-parallel in one module"),
    ],
)
def test_what_would_count_once_a_rank_is_refused(kind: type[nn.Module], plan: TensorPlan, message: str) -> None:
    with pytest.raises(NoRegion, match=message):
        check(kind, plan)


def test_a_region_within_another_is_refused() -> None:
    model = nn.Sequential(Perceptron(), nn.Linear(4, 8), nn.Linear(8, 4))
    plan = resolve(model, PLAN | {"1": ColumnParallel(), "2": RowParallel()})
    with pytest.raises(NoRegion, match=r"0\.down lies within the module of 2, which is row-parallel as well"):
        check_regions(model, plan, torch.ones(2, 4))
