"""What the optimizer remembers is what one process remembers, whole and by logical name, however it was sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from harness.layout import Layout
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

_SCENES = Path(__file__).with_name("state_scenes.py")
Remembered = Callable[..., dict[str, Tensor]]


@pytest.fixture(scope="module")
def remembered(worlds: Worlds) -> Remembered:
    """By parameter and kind, as one key; each only once."""

    @cache
    def state(
        workload: str, scene: str, layout: Layout, options: tuple[tuple[str, Any], ...] = ()
    ) -> dict[str, Tensor]:
        name, size = f"{_SCENES}:{scene}", layout.world_size
        case = parity_case(workload, name, size, layout=layout, options=dict(options), precision="fp64")
        return worlds.trajectory(case).buffers

    return state


@pytest.mark.parametrize(
    ("scene", "layout", "options"),
    [
        ("DataParallel", Layout(data=2), {}),
        ("ShardedOptimizer", Layout(data=3), {"stage": 1, "transport": "shared_memory"}),
        ("ShardedOptimizer", Layout(data=3), {"stage": 2, "bucket_bytes": 1000}),
        ("ShardedOptimizer", Layout(data=2), {"stage": 3}),
        ("TensorParallel", Layout(tensor=2), {}),
        ("Pipeline", Layout(pipeline=2), {}),
        ("Hybrid", Layout(data=2, tensor=2), {"stage": 1}),
        ("Hybrid", Layout(tensor=2, pipeline=2), {}),
        ("Hybrid", Layout(data=2, pipeline=2), {"stage": 1}),
    ],
    ids=str,
)
def test_state_is_what_one_process_has(
    remembered: Remembered, scene: str, layout: Layout, options: dict[str, Any]
) -> None:
    for workload, kinds in (
        ("awkward:kind=tied", {"exp_avg", "exp_avg_sq", "step"}),
        ("awkward:kind=gqa,optimizer=sgd,momentum=0.9", {"momentum_buffer"}),
    ):
        right = remembered(workload, "OneProcess", Layout())
        got = remembered(workload, scene, layout, tuple(options.items()))
        assert {key.rpartition(" ")[2] for key in right} == kinds
        assert got.keys() == right.keys()
        for key, value in right.items():
            assert got[key].shape == value.shape, key
            scale = float(value.abs().max())
            torch.testing.assert_close(got[key].double(), value.double(), rtol=0.0, atol=1e-12 * scale, msg=key)


@pytest.mark.parametrize(("scene", "options"), [("DataParallel", {}), ("ShardedOptimizer", {"stage": 2})], ids=str)
def test_a_step_in_which_a_parameter_is_not_used_does_not_count_for_it(
    remembered: Remembered, scene: str, options: dict[str, Any]
) -> None:
    workload = "awkward:kind=sometimes_unused"
    right, got = (
        remembered(workload, "OneProcess", Layout()),
        remembered(workload, scene, Layout(data=2), tuple(options.items())),
    )
    steps = {key: float(value) for key, value in right.items() if key.endswith(" step")}
    assert len(set(steps.values())) > 1
    assert {key: float(value) for key, value in got.items() if key.endswith(" step")} == steps


def test_nothing_is_remembered_without_moments(remembered: Remembered) -> None:
    workload = "awkward:kind=gqa,optimizer=sgd,momentum=0.0"
    for scene, size in (("DataParallel", 2), ("ShardedOptimizer", 2), ("OneProcess", 1)):
        assert remembered(workload, scene, Layout(data=size)) == {}
