"""What is no chain says why, in one line, before anything is trained."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from harness.chain import NoChain, TensorShape, borders, chain_of, why_not
from harness.datasets import Tensors
from harness.workload import Workload, children_of_sequential


def workload(
    model: Callable[[], nn.Module], chain: Callable[[nn.Module], Sequence[nn.Module]] = children_of_sequential
) -> Workload:
    return Workload(name="own", model=model, dataset=Tensors(torch.zeros(4, 3), torch.zeros(4, 2)), chain=chain)


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x


class Answering(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": x}


class Borrowing(nn.Module):
    """Uses the weight of a layer that is registered elsewhere."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer[0].weight


def borrowing() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), Borrowing(layer))


class Shifting(nn.Module):
    """By a buffer that nobody writes."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Keeping(nn.Module):
    """Keeps what it is given for a later block."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(3, 3), kept

    def forward(self, x: Tensor) -> Tensor:
        self.kept[:] = [x]
        output: Tensor = self.layer(x)
        return output


class Injecting(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + self.kept[0]
        return output


def injecting() -> nn.Module:
    kept: list[Tensor] = []
    return nn.Sequential(Keeping(kept), nn.Tanh(), Injecting(kept))


def sharing_statistics() -> nn.Module:
    norm = nn.BatchNorm1d(3)
    return nn.Sequential(nn.Sequential(nn.Linear(3, 3), norm), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), norm))


def test_borders_are_the_shapes_that_cross_them() -> None:
    found = borders(workload(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))), torch.zeros(4, 3))
    widths = [5, 5, 2]
    assert found == tuple(
        (TensorShape(shape=(4, width), dtype=torch.float32, carries_gradient=True),) for width in widths
    )
    assert found[0][0].num_bytes == 4 * 5 * 4


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), Reading()), "pipeline: 1 cannot be run without values: RuntimeError: "),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), "pipeline: 0 cannot be run without values: RuntimeError: "),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), Answering(), nn.Tanh()),
            "pipeline: 1: blocks may hand on tensors, got dict",
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)),
            "pipeline: 1 changes in place what it is given, which a stage receives: use operations out of place there",
        ),
        (borrowing, "pipeline: 2 uses 0.weight, which is another block's"),
        (injecting, "pipeline: 2 uses what 0 is given, past the blocks between them"),
        (sharing_statistics, "pipeline: 2 writes the buffer 0.1.num_batches_tracked, which 0 uses: each stage would"),
    ],
)
def test_a_block_at_fault_is_named(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(NoChain, match=re.escape(message)) as raised:
        borders(workload(model), torch.zeros(4, 3))
    assert "\n" not in str(raised.value)


def test_what_is_given_may_be_handed_on_and_buffers_may_be_shared_or_written() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.BatchNorm1d(3), Shifting(), Shifting(), nn.Identity(), nn.BatchNorm1d(3))
        made[2].shift = made[1].shift
        return made

    assert len(borders(workload(model), torch.zeros(4, 3))) == 5
    assert len(borders(workload(lambda: nn.Sequential(nn.Identity(), nn.Identity())), torch.zeros(4, 3))) == 2


def test_every_parameter_belongs_to_a_block() -> None:
    with pytest.raises(NoChain, match=r"pipeline: parameter 1\.weight belongs to none of the blocks 0$"):
        chain_of(workload(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), lambda model: [model[0]]))


def test_a_model_that_cannot_be_built_without_values_says_so() -> None:
    def model() -> nn.Module:
        layer = nn.Linear(3, 3)
        assert float(layer.weight.detach().sum()) < 100
        return layer

    with pytest.raises(NoChain, match="pipeline: the chain cannot be built without values: RuntimeError: "):
        chain_of(workload(model))


def test_a_workload_may_have_no_chain() -> None:
    with pytest.raises(NoChain, match="workload own has no chain: it does not say which blocks follow each other"):
        chain_of(Workload(name="own", model=nn.Identity, dataset=Tensors(torch.zeros(1), torch.zeros(1))))


class Several(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.unbind(1)


class First(nn.Module):
    def forward(self, several: tuple[Tensor, ...]) -> Tensor:
        return several[0]


def test_a_border_may_have_so_many_tensors_and_no_more() -> None:
    several = workload(lambda: nn.Sequential(nn.Linear(3, 3), Several(), First()))
    assert why_not(several, 2) is None
    assert why_not(several, 2, max_tensors=3) is None
    assert why_not(several, 2, max_tensors=2) == "pipeline: 1 may hand on at most 2 tensors, got 3"


def test_random_numbers_belong_to_blocks_that_the_model_itself_calls() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))

    drawing = replace(workload(model, lambda m: [m[0], nn.Sequential(m[1], m[2])]), uses_random_numbers=True)
    reason = why_not(drawing, 2)
    assert reason is not None and reason.startswith(
        "pipeline: the block of 2 is no module of the model itself, so that"
    )
    assert why_not(replace(drawing, uses_random_numbers=False), 2) is None
    assert why_not(replace(drawing, chain=children_of_sequential), 2) is None
