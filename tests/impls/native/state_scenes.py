"""Implementations as they are, but that their buffers are what their optimizers remember: so it comes with every
trajectory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harness.implementation import Implementation
from impls.native.ddp import NativeDataParallel
from impls.native.hybrid import NativeHybrid
from impls.native.pipeline import NativePipeline
from impls.native.tensor import NativeTensorParallel
from impls.native.zero import NativeShardedOptimizer
from impls.reference import Reference


def _telling(kind: type[Implementation]) -> Any:
    def full_buffers(self: Implementation) -> dict[str, Tensor]:
        states = self.full_optimizer_state()
        assert states is not None
        return {f"{name} {key}": value for name, state in states.items() for key, value in state.items()}

    return type(kind.__name__, (kind,), {"full_buffers": full_buffers})


OneProcess = _telling(Reference)
DataParallel = _telling(NativeDataParallel)
ShardedOptimizer = _telling(NativeShardedOptimizer)
TensorParallel = _telling(NativeTensorParallel)
Pipeline = _telling(NativePipeline)
Hybrid = _telling(NativeHybrid)
