"""The small decoder that the awkward token workloads are variations of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from harness.models import gpt
from harness.models.awkward.samples import token_samples
from harness.workload import Training, Workload, children_of_sequential

VOCABULARY_SIZE = 32
LENGTH = 8


def small_gpt(
    training: Training,
    *,
    num_layers: int = 2,
    vocabulary_size: int = VOCABULARY_SIZE,
    tied: bool = False,
    dropout: float = 0.0,
    num_valid: Tensor | None = None,
    change: Callable[[nn.Module], None] = lambda model: None,
    **fields: Any,
) -> Workload:
    """A decoder of width 16 on random tokens; `change` edits the fresh module, `fields` go to Workload."""
    shape = gpt.Shape(
        num_layers=num_layers, width=16, num_heads=2, vocabulary_size=vocabulary_size, sequence_length=LENGTH
    )

    def model() -> nn.Module:
        decoder = gpt.decoder(shape, tied=tied, dropout=dropout, attention_dropout=dropout)
        change(decoder)
        return decoder

    return Workload(
        name="awkward",
        model=model,
        dataset=token_samples(vocabulary_size, LENGTH, num_valid),
        training=training,
        chain=children_of_sequential,
        **{"tensor_plan": lambda model: gpt.tensor_plan(shape), **fields},
        uses_random_numbers=dropout > 0,
        draws_in_regions=dropout > 0,
        depends_on_chunks=dropout > 0,
    )
