"""Candidates: ways to train a piece of work, each with what is known of it, read from results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.choosing.origins import machine_of
from harness.choosing.work import settings_of, work_of
from harness.result import Result

Basis = Literal["measured", "another link", "predicted"]
CATEGORIES = ("parameter", "gradient", "optimizer", "communication_buffer", "activation", "other")
SINGLE = "single"
WHOLE = "data_parallel"  # every device holds all states
HYBRID_SHARDING = "hybrid_sharding"
_PARTS = "parity failed"
_PEAK = "memory.peak_allocated_bytes.max_rank"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a candidate runs: how many devices, on how many nodes, over which link between them."""

    num_devices: int
    num_nodes: int = 1
    link_mbits: float | None = None
    delay_ms: float = 0.0

    def __str__(self) -> str:
        return f"{self.devices} on {self.num_nodes} nodes {self.link}" if self.num_nodes > 1 else self.devices

    @property
    def devices(self) -> str:
        return f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"

    @property
    def link(self) -> str:
        """`at 200 Mbit/s +5 ms`; as fast as they come where it is not shaped; empty within one node."""
        if self.num_nodes == 1:
            return ""
        rate = "over unshaped links" if self.link_mbits is None else f"at {_rate(self.link_mbits)}"
        return f"{rate} +{self.delay_ms:g} ms" if self.delay_ms else rate


def _rate(mbits: float) -> str:
    return f"{mbits / 1000:g} Gbit/s" if mbits >= 1000 else f"{mbits:g} Mbit/s"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train. What is not known is None. `state_bytes` by category, of the rank that holds most. With the
    basis `predicted` memory and bytes are, `another link` has them from where only the link was another one, and
    neither has a time; `memory_basis` is that of the memory alone. `trains_the_same` is None where nothing was held
    against the reference; `other_work` says what it does otherwise than the recipe, which parity may not show."""

    work: str
    precision: str
    machine: str
    place: Place
    implementation: str
    label: str
    layout: str
    strategy: str
    basis: Basis = "measured"
    memory_basis: Basis = "measured"
    status: str = "ok"
    reason: str = ""
    unit: str = "tokens"
    units_per_second: float | None = None
    peak_bytes: float | None = None
    state_bytes: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: float | None = None
    node_bytes: float | None = None
    busy_ratio: float | None = None
    exposed_ratio: float | None = None
    bubble_ratio: float | None = None
    trains_the_same: bool | None = None
    other_work: str | None = None
    case_id: str = ""

    @property
    def family(self) -> str:
        """Whose code: native, torch, deepspeed, fairscale."""
        return self.implementation.partition(".")[0]


def candidates(results: Iterable[Result]) -> list[Candidate]:
    """Those that train: floors do not. Of a case that was measured several times on one machine the latest counts."""
    found = [_candidate(result) for result in latest(results) if result.case.role != "floor"]
    measured = {_setting(one): one for one in found if one.peak_bytes is not None and one.memory_basis == "measured"}
    return [_with_memory(one, measured.get(_setting(one))) for one in found]


def _setting(one: Candidate) -> tuple[object, ...]:
    """What it is, on whatever nodes."""
    return (one.work, one.precision, one.machine, one.place.num_devices, one.label, one.layout)


def _with_memory(one: Candidate, measured: Candidate | None) -> Candidate:
    """Memory that was not measured here is what it was over another link, before it is what was foreseen."""
    if measured is None or one.status != "ok" or (one.peak_bytes is not None and one.memory_basis == "measured"):
        return one
    return replace(one, memory_basis="another link", peak_bytes=measured.peak_bytes, state_bytes=measured.state_bytes)


def latest(results: Iterable[Result]) -> list[Result]:
    """The latest of each case and machine, whatever it was compared with, in the order in which they were measured."""
    found: dict[tuple[str, str], Result] = {}
    for result in sorted(results, key=lambda result: result.started):
        key = (replace(result.case, comparison="").id, machine_of(result))
        found.pop(key, None)
        found[key] = result
    return list(found.values())


def _candidate(result: Result) -> Candidate:
    case, metrics = result.case, result.metrics
    unit = "samples" if "throughput.samples_per_second" in metrics else "tokens"
    topology = case.placed
    parity = result.parity
    peak = metrics.get(_PEAK)
    foreseen = "" if peak is not None or result.status not in ("ok", _PARTS) else "predicted_"
    reason = result.reason or (parity.explanation if parity is not None and not parity.ok else "") or ""
    return Candidate(
        work=work_of(case.workload),
        precision=case.precision,
        machine=machine_of(result),
        place=Place(
            num_devices=case.world_size,
            num_nodes=topology.num_nodes,
            link_mbits=topology.link_mbits,
            delay_ms=topology.delay_ms,
        ),
        implementation=case.implementation,
        label=label_of(result),
        layout=str(case.layout),
        strategy=strategy_of(result),
        status=result.status,
        reason=" ".join(reason.split()),
        unit=unit,
        units_per_second=metrics.get(f"throughput.{unit}_per_second"),
        memory_basis="predicted" if foreseen else "measured",
        peak_bytes=metrics.get("memory.predicted_peak_bytes") if foreseen else peak,
        state_bytes={name: metrics[key] for name in CATEGORIES if (key := f"memory.{foreseen}{name}_bytes") in metrics},
        sent_bytes=metrics.get("communication.bytes_per_step"),
        node_bytes=metrics.get("communication.node_wire_bytes_per_step"),
        busy_ratio=metrics.get("communication.busy_ratio"),
        exposed_ratio=metrics.get("communication.exposed_ratio"),
        bubble_ratio=metrics.get("pipeline.bubble_ratio"),
        trains_the_same=False if result.status == _PARTS else None if parity is None else parity.ok,
        other_work=None if result.other_work is None else " ".join(result.other_work.split()),
        case_id=case.id,
    )


def label_of(result: Result) -> str:
    """The implementation with everything that tells it from its neighbours but the number of devices."""
    case = result.case
    layout = case.layout
    axes = {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline}
    degrees = [f"{name}={degree}" for name, degree in axes.items() if degree > 1]
    parts = [case.label]
    if len(degrees) > 1:
        parts += degrees
    if layout.shard is not None:
        parts.append(f"shard={layout.shard}")
    if case.placed.num_nodes > 1 and case.placed.placement != "contiguous":
        parts.append(str(case.placed.placement))
    parts.append(settings_of(case.workload))
    if case.role == "floor":
        parts.append("(floor)")
    return " ".join(part for part in parts if part)


def strategy_of(result: Result) -> str:
    """The result's, but a shard group smaller than the data axis makes it a strategy of its own."""
    layout = result.case.layout
    if layout.shard is not None and 1 < layout.shard < layout.data and layout.tensor * layout.pipeline == 1:
        return HYBRID_SHARDING
    return result.strategy or result.case.implementation.rpartition(".")[2]


def one_process(found: Sequence[Candidate], work: str, precision: str, machine: str) -> Candidate | None:
    """The single process that does the same work, on the same machine if it was measured there."""
    wanted = (work, precision, SINGLE, "ok", None)
    alike = [one for one in found if (one.work, one.precision, one.strategy, one.status, one.other_work) == wanted]
    # One micro-batch first: how many there are is a way to save memory, which the others may not have taken.
    alike.sort(key=lambda one: (one.machine != machine, one.label != one.implementation))
    return next(iter(alike), None)
