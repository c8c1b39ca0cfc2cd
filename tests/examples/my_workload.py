"""A workload of one's own: `meshmark try native.ddp --workload my_workload.py:sine:width=64 --data 2`."""

import torch
from torch import nn

from harness.datasets import Tensors
from harness.workload import Training, Workload


def sine(width: int = 32) -> Workload:
    x = torch.linspace(-3, 3, 1024).unsqueeze(1)
    return Workload(
        name="sine",
        model=lambda: nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)),
        dataset=Tensors(x, x.sin()),
        loss=lambda outputs, targets: (outputs - targets).square().sum(),
        training=Training(global_batch_size=16, learning_rate=1e-2),
        unit="samples",
    )
