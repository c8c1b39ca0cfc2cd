"""Whoever takes a gradient of every parameter for granted names the one that has none, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.launch.failure import LaunchFailed
from tests.conftest import parity_case
from tests.impls.test_conformance import skip_unless_available

if TYPE_CHECKING:
    from tests.conftest import Worlds

WORKLOADS = Path(__file__).with_name("undeclared.py")
EVERYWHERE, ON_SOME_RANKS = ("everywhere", "unused.weight"), ("on_some_ranks", "branch.weight")
AS_A_BASELINE = (pytest.mark.baselines, pytest.mark.timeout(1200))  # the first one waits for a compilation


@pytest.mark.parametrize(
    ("name", "options", "scene"),
    [
        ("torch.ddp", {}, EVERYWHERE),
        pytest.param("torch.ddp", {}, ON_SOME_RANKS, marks=pytest.mark.exhaustive),
        pytest.param("torch.zero", {}, EVERYWHERE, marks=pytest.mark.exhaustive),
        *(
            pytest.param(name, options, scene, marks=AS_A_BASELINE)
            for name, options in (
                ("fairscale.oss", {}),
                ("fairscale.sharded_ddp", {}),
                ("fairscale.sharded_ddp", {"reduce_buffer_size": 0}),
                ("deepspeed.zero", {"stage": 0}),
                ("deepspeed.zero", {"stage": 1}),
            )
            for scene in (EVERYWHERE, ON_SOME_RANKS)
        ),
        # Stages 2 and 3 reduce within backward, where ranks that part have gloo abort before anybody can tell.
        pytest.param("deepspeed.zero", {"stage": 2}, EVERYWHERE, marks=AS_A_BASELINE),
        pytest.param("deepspeed.zero", {"stage": 3}, EVERYWHERE, marks=AS_A_BASELINE),
    ],
    ids=str,
)
def test_an_unused_parameter_is_named(
    worlds: Worlds, name: str, options: dict[str, Any], scene: tuple[str, str]
) -> None:
    skip_unless_available(name)
    workload, parameter = scene
    with pytest.raises(LaunchFailed) as failed:
        worlds.trajectory(parity_case(f"{WORKLOADS}:{workload}", name, 2, options=options))
    told = str(failed.value)
    assert f"{name}: " in told
    assert parameter in told
    assert "the workload must say leaves_parameters_unused=True" in told
