"""What sharding costs and saves: data parallel beside the three stages of the sharded optimizer, ours and torch's.

The model is small enough for a laptop and large enough that its states outweigh everything else in memory; its batch is
so small that communication counts. Two ranks shard over both; four shard in pairs, and the pairs replicate each other.
Cases of a layout are timed in turns, against the compute-only floor. `meshmark compare` makes a page of the run.
"""

from collections.abc import Mapping
from typing import Any

from harness.case import Case, Measurement, Role, Suite
from harness.layout import Layout

_WORKLOAD = "gpt:size=17m,vocabulary_size=512,sequence_length=32,global_batch_size=4"
_MEASUREMENT = Measurement(
    parity_steps=3, warm_up_steps=3, timed_steps=3, rounds=4, communication_steps=3, memory_steps=1
)

_SHARDED_OVER_ALL: tuple[tuple[Role, str, Mapping[str, Any]], ...] = (
    ("floor", "native.floor", {}),  # of data parallelism, which is among them: sharded optimizers update less
    ("subject", "native.ddp", {}),
    ("peer", "torch.ddp", {}),
    *(
        ("subject", "native.zero", {"stage": stage, "transport": transport})
        for stage in (1, 2, 3)
        for transport in ("process_group", "shared_memory")
    ),
    ("peer", "torch.zero", {}),
    ("peer", "torch.fsdp", {"reshard_after_forward": True}),
    ("peer", "torch.fsdp", {"reshard_after_forward": False}),
)
_SHARDED_IN_PAIRS: tuple[tuple[Role, str, Mapping[str, Any]], ...] = (
    ("floor", "native.floor", {"shards_update": True}),
    ("subject", "native.zero", {"stage": 3}),
    ("peer", "torch.fsdp", {"reshard_after_forward": True}),
)

suite = Suite(
    name="sharding",
    description="data parallel beside ZeRO 1, 2 and 3: memory, bytes, latencies, time, lines",
    interleaved=True,
    cases=(
        Case(workload=_WORKLOAD, implementation="reference", role="reference", measurement=_MEASUREMENT),
        *(
            Case(
                workload=_WORKLOAD,
                implementation=implementation,
                layout=layout,
                options=options,
                role=role,
                measurement=_MEASUREMENT,
            )
            for layout, members in (
                (Layout(data=2), _SHARDED_OVER_ALL),
                (Layout(data=4, shard=2), _SHARDED_IN_PAIRS),
            )
            for role, implementation, options in members
        ),
    ),
)
