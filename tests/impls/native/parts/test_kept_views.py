"""Views of parameters that a module keeps, found before its parameters move."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

from impls.native.parts.kept_views import KeptViews


def test_a_view_that_is_still_kept_after_a_forward_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].mirrors = {"transposed": [model[1].weight.detach().t()]}
    views = KeptViews(model, "ours")
    with pytest.raises(RuntimeError, match=r"ours: 1\.mirrors\['transposed'\]\[0\] was made of parameter 1\.weight wh"):
        views.check()


def test_a_buffer_may_be_a_view_too() -> None:
    layer = nn.Linear(3, 3)
    layer.register_buffer("first_row", layer.weight.detach()[0])
    with pytest.raises(RuntimeError, match=r"ours: first_row was made of parameter weight"):
        KeptViews(layer, "ours").check()


def test_parameters_themselves_copies_and_views_made_anew_are_fine() -> None:
    layer = nn.Linear(3, 3)
    layer.again, layer.copy = [layer.weight], layer.weight.detach().clone()
    normed = spectral_norm(nn.Linear(3, 3))  # its plain weight shows a parameter's memory until the first forward
    model = nn.Sequential(layer, normed)
    views = KeptViews(model, "ours")
    model(torch.randn(2, 3))
    views.check()


def test_parameters_that_overlap_are_refused() -> None:
    model = nn.Linear(3, 3)
    model.row = nn.Parameter(model.weight.detach()[1])
    with pytest.raises(ValueError, match="parameters that share no memory, got weight and row, which do"):
        KeptViews(model, "ours")


class Halves(nn.Module):
    """Two parameters that fill one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(4, 6)
        self.left, self.right = (nn.Parameter(half) for half in both.chunk(2))
        self.corner = both[2:, 4:]


def test_parameters_that_lie_beside_each_other_share_nothing_and_owners_are_told_apart() -> None:
    with pytest.raises(RuntimeError, match=r"ours: corner was made of parameter right when"):
        KeptViews(Halves(), "ours").check()
    model = Halves()
    model.last = nn.Parameter(model.left.detach()[1, 4:].expand(2, 2))
    with pytest.raises(ValueError, match="parameters that share no memory, got left and last, which do"):
        KeptViews(model, "ours")


def test_attributes_that_hold_themselves_are_looked_through() -> None:
    @dataclass
    class Held:
        view: torch.Tensor

    model = nn.Linear(3, 3)
    model.kept = {"none": None}
    model.kept["self"] = [model.kept, Held(model.weight.detach().t())]
    with pytest.raises(RuntimeError, match=r"ours: kept\['self'\]\[1\]\.view was made of parameter weight when"):
        KeptViews(model, "ours").check()
