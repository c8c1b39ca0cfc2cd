from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from harness import models
from harness.workload import Workload
from impls.deepspeed import tensor, zero
from impls.deepspeed.parts.clipping_norm import keep_norm

ENGINES_OWN = 0.25
OURS = 0.5


def after_backward(kind: Any, workload: Workload, *, tracks: bool) -> tuple[Any, list[str]]:
    """An implementation whose engine clips, beside what was called on it."""
    called: list[str] = []
    engine = SimpleNamespace(
        step=lambda: called.append("step"),
        zero_grad=lambda: called.append("zero_grad"),
        was_step_applied=lambda: True,
        get_global_grad_norm=lambda: ENGINES_OWN,
    )
    made = object.__new__(kind)
    made.__dict__.update(
        workload=workload,
        engine=engine,
        optimizer=SimpleNamespace(param_groups=[{}]),
        tracks_gradient_norm=tracks,
        trained={},
        stage=0,
        num_updates=0,
        _leaves_out_norm=False,
        _norm=lambda: torch.tensor(OURS),
    )
    return made, called


@pytest.mark.parametrize("kind", [tensor.DeepSpeedTensorParallel, zero.DeepSpeedZero], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("recipe", "tracks", "expected"),
    [
        ("clip_norm=1.0", False, ENGINES_OWN),
        ("clip_norm=1.0", True, OURS),
        ("clip_norm=1.0,skip_nonfinite=true", False, OURS),
        ("seed=1", False, None),
        ("seed=1", True, OURS),
    ],
)
def test_a_norm_that_the_engine_takes_is_not_taken_again(
    monkeypatch: pytest.MonkeyPatch, kind: Any, recipe: str, tracks: bool, expected: float | None
) -> None:
    monkeypatch.setattr(zero, "global_norm", lambda gradients: torch.tensor(OURS))
    made, called = after_backward(kind, models.load(f"gpt:size=tiny,{recipe}"), tracks=tracks)
    asks = {"asks_for_norm": tracks or made.workload.training.checks_norm} if kind is zero.DeepSpeedZero else {}
    norm, skipped = made._step(1e-3, **asks)
    assert (None if norm is None else float(norm), skipped, called) == (expected, False, ["step"])


def test_an_engine_without_zero_keeps_the_norm_by_which_it_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    library = ModuleType("deepspeed.runtime.utils")
    vars(library)["clip_grad_norm_"] = lambda **given: told.update(given) or torch.tensor(ENGINES_OWN)
    for name in ("deepspeed", "deepspeed.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    engine = SimpleNamespace(module=torch.nn.Linear(1, 1), gradient_clipping=lambda: 0.5, mpu="mpu")
    keep_norm(engine)
    engine.clip_fp32_gradients()
    assert float(engine._global_grad_norm) == ENGINES_OWN
    assert (len(list(told["parameters"])), told["max_norm"], told["mpu"]) == (2, 0.5, "mpu")
