"""fairscale.fsdp where there is no GPU: FairScale's own code, whose CUDA streams are one that does nothing, and whose
reductions take lists, since gloo has no reduce-scatter of stacked buffers."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import torch

from impls.fairscale.fsdp import FairScaleFullySharded


class _OnlyStream:
    def wait_stream(self, other: object) -> None: ...


class WithoutStreams(FairScaleFullySharded):
    @classmethod
    def unsupported(cls, *arguments: Any) -> str | None:
        return None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        from fairscale.nn.data_parallel import FullyShardedDataParallel
        from fairscale.nn.data_parallel import fully_sharded_data_parallel as library

        only = _OnlyStream()
        set_up, bucketer = FullyShardedDataParallel._setup_streams, library.ReduceScatterBucketer

        def setup_streams(wrapper: Any) -> None:
            with patch.object(torch.cuda, "is_available", return_value=True):
                set_up(wrapper)

        self._patches = contextlib.ExitStack()
        for patched in (
            patch.object(torch.cuda, "Stream", return_value=only),
            patch.object(torch.cuda, "current_stream", return_value=only),
            patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
            patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
            patch.object(FullyShardedDataParallel, "_setup_streams", setup_streams),
            patch.object(library, "ReduceScatterBucketer", lambda capacity: bucketer(0)),
        ):
            self._patches.enter_context(patched)
        super().__init__(*arguments, **options)

    def close(self) -> None:
        self._patches.close()
