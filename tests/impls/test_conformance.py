"""Every implementation on every awkward workload, in fp64, against one process to 1e-12 (in fp32, within its noise,
where a library trains no fp64); a new file under impls/ is covered without a line here.

A setting is an implementation with its options. Settings take turns on workloads and layouts; the whole product, some
3,500 cases, is `nox -s conformance` (pytest -m exhaustive).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import implementation, models
from harness.layout import Layout
from harness.models.awkward import KINDS
from harness.workload import in_precision
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Worlds

_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "native.ddp": [
        {},
        {"transport": "shared_memory", "small_bytes": 0},
        {"reduction": "ring", "bucket_bytes": 1000, "small_bytes": 0},
        {"reduction": "parameter_server"},
        {"bucket_bytes": 1, "small_bytes": 0, "direct_gradients": False},
        {"transport": "shared_memory", "bucket_bytes": 1000, "direct_gradients": False},
    ],
    "native.zero": [
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"stage": 1, "transport": "shared_memory", "bucket_bytes": 1000},
        {"stage": 2, "transport": "shared_memory", "bucket_bytes": 1000, "direct_gradients": False},
        {"stage": 2, "bucket_bytes": 1},
        {"stage": 3, "transport": "shared_memory"},
        {"stage": 3, "reshard_after_forward": False, "bucket_bytes": 1000, "direct_gradients": False},
    ],
    "native.tensor": [
        {},
        {"transport": "shared_memory"},
        {"sequence_parallel": True, "direct_gradients": False},
        {"sequence_parallel": True, "transport": "shared_memory"},
    ],
    "native.pipeline": [
        {},
        {"schedule": "gpipe", "partition": "uniform"},
        {"schedule": "zero_bubble"},
        {"schedule": "interleaved_1f1b", "chunks": 2, "direct_gradients": False},
        {"schedule": "zero_bubble_h2"},
    ],
    "native.hybrid": [
        {},
        {"stage": 1, "transport": "shared_memory", "schedule": "zero_bubble", "partition": "uniform"},
        {"stage": 2, "sequence_parallel": True, "bucket_bytes": 1000},
        {"stage": 3, "transport": "shared_memory"},
    ],
    "torch.ddp": [{}, {"find_unused_parameters": True}],
    "torch.pipeline": [
        {},
        {"schedule": "gpipe", "partition": "uniform"},
        {"schedule": "zero_bubble"},
        {"schedule": "zero_bubble", "chunks": 2},
        {"schedule": "interleaved_1f1b", "chunks": 2},
    ],
    "torch.hybrid": [{}, {"schedule": "zero_bubble", "chunks": 2}],
    "torch.fsdp": [{}, {"reshard_after_forward": False}],
    "fairscale.pipe": [{}, {"chunks": 1}, {"num_partitions": 3, "chunks": 2, "checkpoint": "except_last"}],
    "fairscale.sharded_ddp": [{}, {"reduce_buffer_size": 0}, {"reduce_buffer_size": 500}],
    "deepspeed.zero": [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2, "reduce_bucket_size": 1000},
        {"stage": 3, "stage3_param_persistence_threshold": 0},
        {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
    ],
    "deepspeed.pipeline": [{}, {"stage": 1, "partition": "uniform"}],
}
_NOT_TRAINING = {"native.floor"}  # exchanges nothing, by design
_OUT_OF_STEP = "DeepSpeed's stage 3 hangs or aborts where ranks call a module unlike numbers of times"
_WORLDS = [Layout(data=size) for size in (1, 2, 3, 4)]
_HYBRIDS = [Layout(data=2, shard=1), Layout(data=4, shard=2), Layout(data=3, shard=1), Layout(data=4, shard=1)]
_SLICES = [Layout(**{axis: size}) for axis in ("tensor", "pipeline") for size in (2, 3, 4)]
_PRODUCTS = [
    Layout(data=2, tensor=2),
    Layout(data=2, pipeline=2),
    Layout(tensor=2, pipeline=2),
    Layout(data=2, shard=1, tensor=2),
]
_ALL = [
    (name, options)
    for name in implementation.names()
    if name not in _NOT_TRAINING
    for options in _SETTINGS.get(name, [{}])
]
_WAYS_TO_THE_SAME = (
    *("transport", "reduction", "bucket_bytes", "reshard_after_forward", "find_unused_parameters"),
    *("sequence_parallel", "schedule", "reduce_buffer_size"),
)


def layouts_for(name: str) -> list[Layout]:
    return _PRODUCTS if "hybrid" in name else [*_WORLDS, *_HYBRIDS, *_SLICES]


def supported_layouts(name: str, options: dict[str, Any], kind: str) -> list[Layout]:
    """Those on which the implementation does not refuse the workload."""
    return layouts_in(precision_of(name, options, kind), name, options, kind)


def layouts_in(precision: str, name: str, options: dict[str, Any], kind: str) -> list[Layout]:
    workload = in_precision(models.load(f"awkward:kind={kind}"), precision)
    loaded = implementation.load(name)
    device = torch.device("cpu")
    return [layout for layout in layouts_for(name) if not loaded.unsupported(workload, layout, device, options)]


def precision_of(name: str, options: dict[str, Any], kind: str) -> str:
    """Another library's own precision may end at fp32."""
    if models.load(f"awkward:kind={kind}").fixed_dtypes:
        return "fp32"
    return "fp32" if implementation.load(name).libraries and not layouts_in("fp64", name, options, kind) else "fp64"


def check(worlds: Worlds, name: str, options: dict[str, Any], kind: str, layout: Layout) -> None:
    case = parity_case(
        f"awkward:kind={kind}",
        name,
        layout.world_size,
        layout=layout,
        options=options,
        precision=precision_of(name, options, kind),
    )
    parity = worlds.parity(case)
    assert parity.ok, f"{layout}: {parity.explanation}"
    assert parity.replicas_bit_equal
    evaluates = implementation.load(name).evaluate is not implementation.Implementation.evaluate
    assert (parity.evaluation_loss_relative is not None) == evaluates


def everyday() -> Iterator[Any]:
    """Every strategy of ours along the data axis on every workload, those along other axes on every third one, every
    other way to them on every sixth, peers on every fourth, on one layout each: neighbours get different ones."""
    for number, (name, options) in enumerate(_ALL):
        is_variant = any(option in options for option in _WAYS_TO_THE_SAME)
        along_data = name in ("native.ddp", "native.zero")
        turns = 6 if is_variant else 1 if along_data else 3 if name.startswith("native.") else 4
        chosen = [kind for place, kind in enumerate(KINDS) if not (number + place) % turns]
        for turn, kind in enumerate(chosen, start=number):
            yield pytest.param(name, options, kind, turn, id=f"{name}-{options}-{kind}", marks=marks_of(name))


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """A third-party library's has a session of its own."""
    is_prepared = [pytest.mark.baselines, pytest.mark.timeout(1200)]  # the first one waits for a compilation
    return is_prepared if implementation.load(name).libraries else []


@pytest.mark.parametrize(("name", "options", "kind", "turn"), list(everyday()))
def test_trains_what_one_process_trains(
    worlds: Worlds, name: str, options: dict[str, Any], kind: str, turn: int
) -> None:
    skip_unless_available(name)
    skip_out_of_step(name, options, kind)
    layouts = supported_layouts(name, options, kind)
    if not layouts:
        pytest.skip(refusal(name, options, kind))
    check(worlds, name, options, kind, layouts[turn % len(layouts)])


@pytest.mark.parametrize("name", [n for n in implementation.names() if n.startswith(("reference", "native", "torch"))])
def test_every_strategy_of_ours_and_of_torch_evaluates(name: str) -> None:
    """What that gives is judged with every case above."""
    assert implementation.load(name).evaluate is not implementation.Implementation.evaluate


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "options"), _ALL, ids=str)
def test_trains_on_every_layout(worlds: Worlds, name: str, options: dict[str, Any], kind: str) -> None:
    skip_unless_available(name)
    skip_out_of_step(name, options, kind)
    layouts = supported_layouts(name, options, kind)
    if not layouts:
        pytest.skip(refusal(name, options, kind))
    for layout in layouts:
        check(worlds, name, options, kind, layout)


def skip_unless_available(name: str) -> None:
    kind = implementation.load(name)
    if reason := kind.unavailable():
        pytest.skip(f"{name} is unavailable: {reason}")
    kind.prepare({})


def skip_out_of_step(name: str, options: dict[str, Any], kind: str) -> None:
    """What no flag of a workload tells beforehand."""
    if name == "deepspeed.zero" and options["stage"] == 3 and kind == "reused":
        pytest.skip(_OUT_OF_STEP)


def refusal(name: str, options: dict[str, Any], kind: str) -> str:
    workload = in_precision(models.load(f"awkward:kind={kind}"), precision_of(name, options, kind))
    return str(implementation.load(name).unsupported(workload, layouts_for(name)[1], torch.device("cpu"), options))


@pytest.mark.parametrize("name", ["native.ddp", "native.zero", "torch.ddp", "torch.fsdp"])
def test_what_is_given_up_leaves_no_threads_behind(worlds: Worlds, name: str) -> None:
    """Process groups end with their implementation: the threads of those that live on wake up a hundred times a second,
    and a world that takes on one case after another comes to a standstill."""
    counts = []
    for _ in range(3):
        launch = worlds.adopt(parity_case("awkward:kind=unequal_tokens", name, 2))
        launch.command("time_steps", num_steps=1)
        counts.append([len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in launch.pids])
    assert counts[2] == counts[1]
