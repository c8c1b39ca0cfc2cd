"""Ours beside everyone else's, strategy by strategy, timed in interleaved rounds on one communication-heavy workload.

Peers run in the settings that serve them best here; each setting is a row of its own, and the ratio is taken against
the fastest of them. Native runs twice: over the process group, where only the algorithm is ours, and over shared
memory, where the transport is too.
"""

from collections.abc import Mapping
from typing import Any

from harness.case import Case, Measurement, Role, Suite
from harness.layout import Layout

_GPT = "gpt:size=17m"
_BATCHES = (4, 16)  # the larger one tells whether an advantage outlives the communication
_MEASUREMENT = Measurement(parity_steps=3, warm_up_steps=5, timed_steps=5, rounds=12, communication_steps=4)

_DATA_PARALLEL: tuple[tuple[Role, str, Mapping[str, Any]], ...] = (
    ("floor", "native.floor", {}),
    ("floor", "native.ddp", {"reduction": "none"}),
    ("subject", "native.ddp", {}),
    ("subject", "native.ddp", {"transport": "shared_memory"}),
    ("peer", "torch.ddp", {}),
    ("peer", "torch.ddp", {"bucket_cap_mb": 100}),
)

suite = Suite(
    name="peers",
    description="ratios to the best peer and to the compute-only floor; interleaved rounds, a quarter of an hour",
    interleaved=True,
    cases=tuple(
        Case(
            workload=f"{_GPT},global_batch_size={batch_size}",
            implementation=implementation,
            layout=Layout(data=world_size),
            options=options,
            role=role,
            measurement=_MEASUREMENT,
            deadline_seconds=600,
        )
        for batch_size in _BATCHES
        for world_size in (2, 4)
        for role, implementation, options in _DATA_PARALLEL
    ),
)
