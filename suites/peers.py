"""Ours beside everyone else's, strategy by strategy, timed in interleaved rounds on one communication-heavy workload.

Peers run in the settings that serve them best here; each setting is a row of its own, and the ratio is taken against
the fastest of them. Native runs twice: over the process group, where only the algorithm is ours, and over shared
memory, where the transport is too. Each strategy is a comparison of its own, with its own floor: fewer processes share
the memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.case import Case, Measurement, Role, Suite
from harness.layout import Layout

_ROUNDS = 12

_Member = tuple[Role, str, Mapping[str, Any]]
_FLOOR: _Member = ("floor", "native.floor", {})
_SHARDED_FLOOR: _Member = ("floor", "native.floor", {"shards_update": True})


def _sharded(stage: int, *peers: tuple[str, Mapping[str, Any]]) -> tuple[_Member, ...]:
    return (
        _SHARDED_FLOOR,
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
        ("peer", "deepspeed.zero", {"stage": 0}),
    ),
    "zero_1": _sharded(
        1,
        ("torch.zero", {}),
        ("deepspeed.zero", {"stage": 1}),
        ("deepspeed.zero", {"stage": 1, "reduce_scatter": False}),
        ("fairscale.oss", {}),
    ),
    "zero_2": _sharded(
        2,
        ("torch.fsdp", {"reshard_after_forward": False}),
        ("deepspeed.zero", {"stage": 2}),
        ("deepspeed.zero", {"stage": 2, "reduce_scatter": False}),
        ("fairscale.sharded_ddp", {}),
        ("fairscale.sharded_ddp", {"reduce_buffer_size": 0, "set_to_none": True}),
    ),
    "zero_3": _sharded(
        3,
        ("torch.fsdp", {}),
        ("torch.fsdp", {"blocks_per_group": 2}),
        ("torch.fsdp", {"reshard_after_forward": False}),
        ("deepspeed.zero", {"stage": 3}),
        ("deepspeed.zero", {"stage": 3, "memory_efficient_linear": False}),
        ("fairscale.fsdp", {}),
    ),
    "tensor_parallel": (
        ("floor", "native.tensor", {"transport": "none"}),
        ("subject", "native.tensor", {}),
        ("subject", "native.tensor", {"transport": "shared_memory"}),
        ("peer", "torch.tensor", {}),
        ("peer", "deepspeed.tensor", {}),
        ("peer", "deepspeed.tensor", {"head": "gathered"}),
        ("peer", "fairscale.tensor", {}),
    ),
    "pipeline_parallel": (
        ("floor", "native.pipeline", {"transport": "none"}),
        ("subject", "native.pipeline", {"schedule": "1f1b"}),
        ("subject", "native.pipeline", {"schedule": "zero_bubble"}),
        ("subject", "native.pipeline", {"schedule": "zero_bubble_h2"}),
        ("peer", "torch.pipeline", {"schedule": "1f1b"}),
        ("peer", "torch.pipeline", {"schedule": "interleaved_1f1b", "chunks": 2}),
        ("peer", "torch.pipeline", {"schedule": "zero_bubble", "chunks": 2}),
        ("peer", "deepspeed.pipeline", {}),
        ("peer", "fairscale.pipe", {}),
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The model, sequences and micro-batches in a step, timed steps in a round, and what is compared along which axis
    with how many ranks."""

    gpt: str = "size=17m"
    batch_size: int
    num_micro_batches: int = 1
    timed_steps: int
    axis: Literal["data", "tensor", "pipeline"] = "data"
    comparisons: tuple[str, ...]
    world_sizes: tuple[int, ...] = (2, 4)


# The larger batch and more micro-batches tell whether an advantage outlives the communication: at two ranks, since four
# share two processors here. The sharded strategies run at the small batch alone, where they differ.
_WORKS = (
    _Work(batch_size=4, timed_steps=3, comparisons=("data_parallel", "zero_1", "zero_2", "zero_3")),
    _Work(batch_size=16, timed_steps=2, comparisons=("data_parallel",), world_sizes=(2,)),
    _Work(batch_size=4, timed_steps=3, axis="tensor", comparisons=("tensor_parallel",), world_sizes=(2,)),
    # Four ranks cannot share six heads.
    _Work(
        gpt="size=30m,sequence_length=128",
        batch_size=4,
        timed_steps=3,
        axis="tensor",
        comparisons=("tensor_parallel",),
        world_sizes=(4,),
    ),
    *(
        _Work(
            batch_size=number,
            num_micro_batches=number,
            timed_steps=max(2, 12 // number),
            axis="pipeline",
            comparisons=("pipeline_parallel",),
            world_sizes=world_sizes,
        )
        for number, world_sizes in ((4, (2, 4)), (8, (2,)))
    ),
)


def _workload(work: _Work) -> str:
    micro_batches = f",num_micro_batches={work.num_micro_batches}" if work.num_micro_batches > 1 else ""
    return f"gpt:{work.gpt},global_batch_size={work.batch_size}{micro_batches}"


suite = Suite(
    name="peers",
    description="ratios to the best peer and to the compute-only floor; interleaved rounds",
    interleaved=True,
    cases=tuple(
        Case(
            workload=_workload(work),
            implementation=implementation,
            layout=Layout(**{work.axis: world_size}),
            options=options,
            role=role,
            comparison=comparison,
            measurement=Measurement(
                parity_steps=3,
                warm_up_steps=4,
                timed_steps=work.timed_steps,
                rounds=_ROUNDS,
                communication_steps=3,
                memory_steps=1,
                pipeline_steps=4,
            ),
            deadline_seconds=600,
        )
        for work in _WORKS
        for world_size in work.world_sizes
        for comparison in work.comparisons
        for role, implementation, options in _COMPARISONS[comparison]
    ),
)
