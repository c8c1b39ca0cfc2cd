"""The nightly job, for `meshmark check`: each family once or twice, small enough for some minutes on two cores."""

from collections.abc import Mapping
from typing import Any

from harness.case import Case, Measurement, Suite
from harness.layout import Layout

# Large enough that a step is mostly work and not mostly waiting to be scheduled, which would be noise.
_WORKLOAD = "gpt:size=17m,vocabulary_size=512,sequence_length=32,global_batch_size=4,num_micro_batches=2"
_MEASUREMENT = Measurement(parity_steps=3, warm_up_steps=3, timed_steps=12, communication_steps=2, memory_steps=1)
# fp64 says whether it is right, and fp32 how fast it is.
_EXACT = Measurement(parity_steps=3, timed_steps=0, communication_steps=0, memory_steps=0, pipeline_steps=0)

_Row = tuple[str, Layout, Mapping[str, Any]]

_OURS: tuple[_Row, ...] = (
    ("native.ddp", Layout(data=2), {}),
    ("native.ddp", Layout(data=2), {"transport": "shared_memory"}),
    ("native.zero", Layout(data=2), {"stage": 1}),
    ("native.zero", Layout(data=2), {"stage": 2}),
    ("native.zero", Layout(data=2), {"stage": 3}),
    ("native.tensor", Layout(tensor=2), {}),
    ("native.pipeline", Layout(pipeline=2), {"schedule": "1f1b"}),
    ("native.pipeline", Layout(pipeline=2), {"schedule": "zero_bubble"}),
    ("native.hybrid", Layout(data=2, tensor=2), {}),
)
_PEERS: tuple[_Row, ...] = (
    ("torch.ddp", Layout(data=2), {}),
    ("torch.zero", Layout(data=2), {}),
    ("torch.fsdp", Layout(data=2), {}),
    ("torch.tensor", Layout(tensor=2), {}),
    ("torch.pipeline", Layout(pipeline=2), {"schedule": "1f1b"}),
    ("deepspeed.zero", Layout(data=2), {"stage": 2}),
    ("deepspeed.zero", Layout(data=2), {"stage": 3}),
    ("deepspeed.tensor", Layout(tensor=2), {}),
    ("deepspeed.pipeline", Layout(pipeline=2), {}),
    ("fairscale.oss", Layout(data=2), {}),
    ("fairscale.sharded_ddp", Layout(data=2), {}),
    ("fairscale.tensor", Layout(tensor=2), {}),
    ("fairscale.pipe", Layout(), {}),  # which takes one process
)

suite = Suite(
    name="nightly",
    description="every family on one small model: time in fp32, and ours once more in fp64; some minutes",
    cases=(
        Case(workload=_WORKLOAD, implementation="reference", role="reference", measurement=_MEASUREMENT),
        *(
            Case(
                workload=_WORKLOAD,
                implementation=implementation,
                layout=layout,
                options=options,
                role="subject" if rows is _OURS else "peer",
                measurement=_MEASUREMENT,
            )
            for rows in (_OURS, _PEERS)
            for implementation, layout, options in rows
        ),
        *(
            Case(
                workload=_WORKLOAD,
                implementation=implementation,
                layout=layout,
                options=options,
                precision="fp64",
                measurement=_EXACT,
            )
            for implementation, layout, options in _OURS
        ),
    ),
)
