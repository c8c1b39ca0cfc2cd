"""Settings of peers that silently train another model, each beside the setting that does not.

The losses look alike for hours; the parity gate has to see the difference within four steps, unprompted, and to say
what it is. A case that stops parting from the reference fails: either a library has changed, or the gate is blind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.case import Case, Expected, Measurement, Suite
from harness.layout import Layout

_MEASUREMENT = Measurement(parity_steps=4, warm_up_steps=2, timed_steps=5, communication_steps=0, memory_steps=0)
_EQUAL_COUNTS = "gpt:size=tiny,text=stdlib,global_batch_size=8"
_CLIPPED_BY_DEFAULT = "gpt:size=tiny,text=stdlib,global_batch_size=8,optimizer=sgd"
_UNEQUAL_COUNTS = "awkward:kind=unequal_tokens"


@dataclass(frozen=True, kw_only=True)
class _Setting:
    implementation: str
    workload: str
    options: Mapping[str, Any] = field(default_factory=dict)
    expected: Expected = "ok"


def _with_and_without(implementation: str, workload: str, **pitfall: Any) -> tuple[_Setting, ...]:
    return (
        _Setting(implementation=implementation, workload=workload),
        _Setting(implementation=implementation, workload=workload, options=pitfall, expected="parity failed"),
    )


_SETTINGS = (
    # Today's torch clears gradients to None, which takes them out of the buffers that are reduced ...
    *_with_and_without("fairscale.sharded_ddp", _EQUAL_COUNTS, set_to_none=True),
    # ... which does no harm where there are none.
    _Setting(
        implementation="fairscale.sharded_ddp",
        workload=_EQUAL_COUNTS,
        options={"set_to_none": True, "reduce_buffer_size": 0},
    ),
    # DeepSpeed clips at 1.0 unless it is told not to.
    *_with_and_without("deepspeed.zero", _CLIPPED_BY_DEFAULT, clipping="default"),
    # A mean over ranks of means over tokens is the mean over all tokens only where counts are equal.
    *_with_and_without("fairscale.sharded_ddp", _UNEQUAL_COUNTS, loss_scaling="rank_mean"),
    *_with_and_without("deepspeed.zero", _UNEQUAL_COUNTS, loss_scaling="rank_mean"),
)

suite = Suite(
    name="pitfalls",
    description="settings of peers that silently train another model, beside those that do not; some minutes",
    cases=tuple(
        Case(
            workload=setting.workload,
            implementation=setting.implementation,
            layout=Layout(data=2),
            options=setting.options,
            role="peer",
            expected=setting.expected,
            measurement=_MEASUREMENT,
        )
        for setting in _SETTINGS
    ),
)
