from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from harness.datasets import Tensors
from harness.workload import Training, Workload, in_precision
from impls.native.parts.synchronised_batch_norm import summed_bytes
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

PROBES = Path(__file__).parents[1] / "probes.py"


@pytest.mark.parametrize("world_size", [2, 3])
def test_unlike_and_empty_shares_equal_one_batch_norm_over_their_union(worlds: Worlds, world_size: int) -> None:
    options = {"scenario": "synchronised_batch_norm"}
    worlds.adopt(parity_case("awkward", f"{PROBES}:Probe", world_size, options=options))


class Norms(nn.Module):
    """One norm is called twice, another never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.five, self.linear = nn.BatchNorm1d(3), nn.BatchNorm1d(5), nn.Linear(3, 5)
        self.frozen = nn.BatchNorm1d(5)

    def train(self, mode: bool = True) -> Norms:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.frozen(self.five(self.linear(self.three(torch.tanh(self.three(x))))))
        return output


@pytest.mark.parametrize(("precision", "itemsize"), [("fp64", 8), ("fp32", 4), ("bf16", 4)])
def test_sums_are_two_a_channel_and_a_count_there_and_back_for_each_call(precision: str, itemsize: int) -> None:
    dataset = Tensors(torch.randn(8, 3), torch.randn(8, 5))
    workload = Workload(name="norms", model=Norms, dataset=dataset, training=Training(global_batch_size=8))
    assert summed_bytes(in_precision(workload, precision), 2) == itemsize * (2 * 7 + 2 * 7 + 2 * 11)
