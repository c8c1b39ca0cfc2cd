"""Which elements of a parameter each rank holds."""

import pytest
import torch
from torch import nn

from harness.tensor_plan import ColumnParallel, RowParallel, VocabularyParallel, resolve
from impls.native.parts.tensor_cut import Cut, cuts_of, take_local


def test_fused_parts_are_each_cut_by_units() -> None:
    cut = Cut(dim=0, size=12, degree=2, unit=2, parts=3)  # two heads of width 2, three parts
    whole = torch.arange(12.0)
    locals_ = [cut.local(whole, rank) for rank in range(2)]
    assert [local.tolist() for local in locals_] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert torch.equal(cut.whole(locals_), whole)


@pytest.mark.parametrize("size", [0, 1, 3, 7, 51])
def test_what_does_not_divide_leaves_the_last_ranks_less(size: int) -> None:
    cut = Cut(dim=1, size=size, degree=4)
    whole = torch.randn(2, size)
    locals_ = [cut.local(whole, rank) for rank in range(4)]
    widths = [local.shape[1] for local in locals_]
    assert sorted(widths, reverse=True) == widths
    assert max(widths) - min(widths) <= 1
    assert torch.equal(cut.whole(locals_), whole)


class Attention(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 4 * num_heads), nn.Linear(4 * num_heads, 8)


PLAN = {"*inner": ColumnParallel(unit=4), "*outer": RowParallel(unit=4)}


def test_layers_learn_their_new_sizes_and_biases_of_sums_stay_whole() -> None:
    model = Attention(num_heads=6)
    cuts = cuts_of(model, resolve(model, PLAN), degree=3)
    assert set(cuts) == {"inner.weight", "inner.bias", "outer.weight"}
    whole = model.inner.weight.detach().clone()
    take_local(model, cuts, rank=1)
    assert (model.inner.in_features, model.inner.out_features, model.outer.in_features) == (8, 8, 8)
    assert torch.equal(model.inner.weight, whole[8:16])


def test_heads_that_do_not_divide_are_refused_with_every_number() -> None:
    model = Attention(num_heads=6)
    with pytest.raises(ValueError, match=r"tensor=4 does not divide inner: 24 output features are 6 units of 4"):
        cuts_of(model, resolve(model, PLAN), degree=4)


def test_no_whole_units_are_refused() -> None:
    model = nn.Sequential(Attention(num_heads=6))
    plan = {"0.inner": ColumnParallel(unit=5), "0.outer": RowParallel()}
    with pytest.raises(ValueError, match=r"0\.inner has 24 output features, which are no whole units of 5"):
        cuts_of(model, resolve(model, plan), degree=2)


def test_tied_parameters_stay_one() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    plan = {"0": VocabularyParallel(), "1": VocabularyParallel()}
    cuts = cuts_of(model, resolve(model, plan), degree=2)
    take_local(model, cuts, rank=0)
    assert model[1].weight is model[0].weight
    assert model[0].weight.shape == (4, 4)


def test_a_tie_that_would_be_cut_in_two_ways_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"1\.weight is tied to a parameter that is cut in another way"):
        cuts_of(model, resolve(model, {"0": VocabularyParallel(), "1": RowParallel()}), degree=2)


@pytest.mark.parametrize(("named", "other"), [("0", "1"), ("1", "0")])
def test_a_tie_of_which_the_plan_names_one_module_is_refused(named: str, other: str) -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=rf"{other}\.weight is tied to {named}\.weight, which is cut, and has no role"):
        cuts_of(model, resolve(model, {named: VocabularyParallel()}), degree=2)
