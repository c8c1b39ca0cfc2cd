"""The main job: data parallel, native and torch's, against one process, on real text and real images."""

from harness.case import Case, Measurement, Suite
from harness.layout import Layout

_WORKLOADS = ("gpt:size=tiny,text=stdlib,global_batch_size=8", "convnet:batch_norm=local,global_batch_size=32")
_MEASUREMENT = Measurement(parity_steps=4, warm_up_steps=5, timed_steps=20)

suite = Suite(
    name="smoke",
    description="reference, native.ddp and torch.ddp at world size 2 and 4 on text and images; two minutes",
    cases=(
        *(
            Case(workload=workload, implementation="reference", role="reference", measurement=_MEASUREMENT)
            for workload in _WORKLOADS
        ),
        *(
            Case(
                workload=workload,
                implementation=implementation,
                layout=Layout(data=world_size),
                role="peer" if implementation.startswith("torch") else "subject",
                measurement=_MEASUREMENT,
            )
            for workload in _WORKLOADS
            for world_size in (2, 4)
            for implementation in ("native.ddp", "torch.ddp")
        ),
    ),
)
