"""How strategies scale: the same work over more ranks (strong), and more work over more ranks (weak).

Strong scaling keeps the global batch, weak scaling each rank's share of it; one process does the same work at either
end. Pipelines take their batch in as many micro-batches as there are sequences, whose reference does so too.
Tensor parallelism stands at two ranks alone: four do not share six heads.
"""

from collections.abc import Mapping
from typing import Any

from harness.case import Case, Measurement, Role, Suite
from harness.layout import Layout

_MODEL = "gpt:size=17m,vocabulary_size=512,sequence_length=32"
_BATCH = 4  # sequences: of strong scaling at every world size, of weak scaling at two ranks
_WORLD_SIZES = (2, 4)
_MEASUREMENT = Measurement(
    parity_steps=3, warm_up_steps=3, timed_steps=6, communication_steps=2, memory_steps=1, pipeline_steps=3
)

_ALONG_DATA: tuple[tuple[Role, str, Mapping[str, Any]], ...] = (
    ("subject", "native.ddp", {}),
    ("peer", "torch.ddp", {}),
    ("subject", "native.zero", {"stage": 1}),
    ("subject", "native.zero", {"stage": 2}),
    ("subject", "native.zero", {"stage": 3}),
)


def _workload(global_batch_size: int, *, in_micro_batches: bool = False) -> str:
    micro_batches = f",num_micro_batches={global_batch_size}" if in_micro_batches else ""
    return f"{_MODEL},global_batch_size={global_batch_size}{micro_batches}"


def _cases() -> list[Case]:
    """Where strong and weak scaling meet, at two ranks, a case counts for both."""
    weak = {world_size: _BATCH * world_size // 2 for world_size in (1, *_WORLD_SIZES)}
    settings: list[tuple[str, Role, str, Layout, Mapping[str, Any]]] = [
        (_workload(batch), "reference", "reference", Layout(), {}) for batch in sorted({_BATCH, weak[1]})
    ]
    settings.append((_workload(_BATCH, in_micro_batches=True), "reference", "reference", Layout(), {}))
    for world_size in _WORLD_SIZES:
        for batch in sorted({_BATCH, weak[world_size]}):
            settings += [
                (_workload(batch), role, name, Layout(data=world_size), options) for role, name, options in _ALONG_DATA
            ]
        if world_size == 2:
            settings.append((_workload(_BATCH), "subject", "native.tensor", Layout(tensor=world_size), {}))
        pipelined = _workload(_BATCH, in_micro_batches=True)
        settings.append((pipelined, "subject", "native.pipeline", Layout(pipeline=world_size), {}))
    return [
        Case(
            workload=workload,
            implementation=name,
            layout=layout,
            options=options,
            role=role,
            measurement=_MEASUREMENT,
        )
        for workload, role, name, layout, options in settings
    ]


suite = Suite(
    name="scaling",
    description="strong and weak scaling of data parallel, ZeRO 1 and 3, tensor and pipeline over 1, 2, 4 ranks",
    cases=tuple(_cases()),
)
