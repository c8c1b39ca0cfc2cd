"""Ours beside everyone else's, strategy by strategy, timed in interleaved rounds on one communication-heavy workload.

Peers run in the settings that serve them best here; each setting is a row of its own, and the ratio is taken against
the fastest of them. Native runs twice: over the process group, where only the algorithm is ours, and over shared
memory, where the transport is too. Each strategy is a comparison of its own, with its own floor: fewer processes share
the memory.
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

_Member = tuple[Role, str, Mapping[str, Any]]
_FLOOR: _Member = ("floor", "native.floor", {})


def _sharded(stage: int, *peers: tuple[str, Mapping[str, Any]]) -> tuple[_Member, ...]:
    return (
        _FLOOR,
        ("subject", "native.zero", {"stage": stage}),
        ("subject", "native.zero", {"stage": stage, "transport": "shared_memory"}),
        *(("peer", name, options) for name, options in peers),
    )


_COMPARISONS: Mapping[str, tuple[_Member, ...]] = {
    "data_parallel": (
        _FLOOR,
        ("floor", "native.ddp", {"reduction": "none"}),
        ("subject", "native.ddp", {}),
        ("subject", "native.ddp", {"transport": "shared_memory"}),
        ("peer", "torch.ddp", {}),
        ("peer", "torch.ddp", {"bucket_cap_mb": 100}),
    ),
    "zero_1": _sharded(1, ("torch.zero", {})),
    "zero_2": _sharded(2, ("torch.fsdp", {"reshard_after_forward": False})),
    "zero_3": _sharded(
        3,
        ("torch.fsdp", {}),
        ("torch.fsdp", {"blocks_per_group": 2}),
        ("torch.fsdp", {"reshard_after_forward": False}),
    ),
}

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
            comparison=comparison,
            measurement=Measurement(
                parity_steps=3, warm_up_steps=4, timed_steps=timed_steps, rounds=_ROUNDS, communication_steps=4
            ),
            deadline_seconds=600,
        )
        for batch_size, timed_steps in _BATCHES.items()
        for world_size in (2, 4)
        # The sharded ones at the small batch alone, where they differ.
        for comparison in (_COMPARISONS if batch_size == min(_BATCHES) else ("data_parallel",))
        for role, implementation, options in _COMPARISONS[comparison]
    ),
)
