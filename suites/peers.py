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
# Sequences in the global batch, and timed steps in a round; the larger batch tells whether an advantage outlives the
# communication.
_BATCHES = {4: 5, 16: 2}
_ROUNDS = 12

_DATA_PARALLEL: tuple[tuple[Role, str, Mapping[str, Any]], ...] = (
    ("floor", "native.floor", {}),
    ("floor", "native.ddp", {"reduction": "none"}),
    ("subject", "native.ddp", {}),
    ("subject", "native.ddp", {"transport": "shared_memory"}),
    ("peer", "torch.ddp", {}),
    ("peer", "torch.ddp", {"bucket_cap_mb": 100}),
)

_SHARDED: tuple[tuple[Role, str, Mapping[str, Any]], ...] = (
    *(
        ("subject", "native.zero", {"stage": stage, "transport": transport})
        for stage in (1, 2, 3)
        for transport in ("process_group", "shared_memory")
    ),
    ("peer", "torch.zero", {}),
    ("peer", "torch.fsdp", {}),
    ("peer", "torch.fsdp", {"blocks_per_group": 2}),
    ("peer", "torch.fsdp", {"reshard_after_forward": False}),
)

suite = Suite(
    name="peers",
    description="ratios to the best peer and to the compute-only floor; interleaved rounds",
    interleaved=True,
    cases=tuple(
        Case(
            workload=f"{_GPT},global_batch_size={batch_size}",
            implementation=implementation,
            layout=Layout(data=world_size),
            options=options,
            role=role,
            measurement=Measurement(
                parity_steps=3, warm_up_steps=4, timed_steps=timed_steps, rounds=_ROUNDS, communication_steps=4
            ),
            deadline_seconds=600,
        )
        for batch_size, timed_steps in _BATCHES.items()
        for world_size in (2, 4)
        # The sharded ones at the small batch alone, where they differ.
        for role, implementation, options in (*_DATA_PARALLEL, *(_SHARDED if batch_size == min(_BATCHES) else ()))
    ),
)
