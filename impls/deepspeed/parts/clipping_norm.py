"""The norm by which an engine without ZeRO clips."""

from __future__ import annotations

from typing import Any


def keep_norm(engine: Any) -> None:
    """Its optimizers in bf16 keep theirs, where `get_global_grad_norm` finds it. In fp32 the engine forgets the one
    that it takes: here it does the same and keeps it there, so that nobody has to take another."""
    from deepspeed.runtime.utils import clip_grad_norm_

    def clip() -> None:
        parameters, most = engine.module.parameters(), engine.gradient_clipping()
        engine._global_grad_norm = clip_grad_norm_(parameters=parameters, max_norm=most, mpu=engine.mpu)

    engine.clip_fp32_gradients = clip
