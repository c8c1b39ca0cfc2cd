from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from harness.uninitialised import Uninitialised

_PROGRAM = """
import sys
from harness import models
for name in ("gpt:size=tiny", "convnet"):
    workload = models.load(name)
    assert all(parameter.is_meta for parameter in workload.model_without_memory().parameters())
assert "torch._dynamo" not in sys.modules
"""


def test_a_model_without_memory_needs_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_has_memory_is_drawn_as_ever() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 3)
    torch.manual_seed(0)
    with Uninitialised():
        drawn = nn.Linear(3, 3)
        assert nn.init.constant_(drawn.bias, 2.0) is drawn.bias
    assert torch.equal(plain.weight, drawn.weight)
    assert drawn.bias.tolist() == [2.0] * 3


def test_without_memory_each_initialiser_still_yields_its_tensor() -> None:
    with torch.device("meta"), Uninitialised():
        weight = nn.Parameter(torch.empty(3, 3))
        for made in (nn.init.normal_(weight), nn.init.zeros_(tensor=weight), weight.detach().normal_(0.0, 0.02)):
            assert made.is_meta
            assert made.shape == (3, 3)
