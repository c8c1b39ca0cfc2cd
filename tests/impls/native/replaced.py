"""Somebody replaces a parameter after the build: the first step must not go on in silence."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from harness.implementation import Implementation, StepOutput
from harness.workload import Batch
from impls.native.ddp import NativeDataParallel
from impls.native.zero import NativeShardedOptimizer


class _Replaced(Implementation):
    module: nn.Module

    def __init__(self, *arguments: Any, how: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        embedding = self.module.get_submodule("embedding.token")
        assert isinstance(embedding, nn.Embedding)
        if how == "parameter":
            embedding.weight = nn.Parameter(embedding.weight.detach().clone())
        else:
            embedding.weight.data = embedding.weight.data.clone()

    def train_step(self, batch: Batch) -> StepOutput:
        for action in (lambda: super(_Replaced, self).train_step(batch), self.full_parameters):
            try:
                action()
            except RuntimeError as error:
                assert "parameter embedding.token.weight was replaced" in str(error), error
            else:
                raise AssertionError("a replaced parameter went unnoticed")
        loss_sum = torch.zeros((), dtype=torch.float64)
        return StepOutput(loss_sum=loss_sum, num_tokens=0, gradient_norm=None, skipped=True, learning_rates=())


class UnderDataParallel(_Replaced, NativeDataParallel):
    pass


class UnderShardedOptimizer(_Replaced, NativeShardedOptimizer):
    pass
