"""Predictions: candidates for places where nothing was measured: from the same place over another link, else from the
closed forms and dry runs that stand beside every measurement. None of them has a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from harness import implementation, models
from harness.case import Case
from harness.choosing.candidates import CATEGORIES, Candidate, Place, candidates
from harness.choosing.work import work_of
from harness.layout import Layout
from harness.measure.predicted_memory import predicted, registry
from harness.result import Result
from harness.topology import Topology
from harness.workload import in_precision

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An implementation with its options, and the layout it was measured with, whose axes say how it grows."""

    case: Case
    strategy: str

    def on(self, place: Place) -> Case | None:
        """The same setting on other devices; None where its degrees do not fit them. Shard groups lie inside nodes."""
        layout = grown(self.case.layout, place)
        if layout is None:
            return None
        topology = None
        if place.num_nodes > 1:
            topology = Topology.of(
                place.num_devices, place.num_nodes, link_mbits=place.link_mbits, delay_ms=place.delay_ms
            )
        return replace(self.case, layout=layout, topology=topology)


def grown(layout: Layout, place: Place) -> Layout | None:
    """The layout over other devices: along its only axis, or along data where it has several."""
    devices = place.num_devices
    if place.num_nodes > 1 and devices % place.num_nodes:
        return None
    if layout.data == 1 and (layout.tensor == 1) != (layout.pipeline == 1):
        return Layout(tensor=devices) if layout.tensor > 1 else Layout(pipeline=devices)
    data, rest = divmod(devices, layout.tensor * layout.pipeline)
    if rest or not data:
        return None
    shard = None
    if layout.shard is not None:
        shard = devices // place.num_nodes if place.num_nodes > 1 else layout.shard
        if data % shard or shard == data:
            return None
    return Layout(data=data, shard=shard, tensor=layout.tensor, pipeline=layout.pipeline)


def settings_of(cases: Iterable[tuple[Case, str]]) -> list[Setting]:
    """The settings among `cases`, given with their strategies, each once: those that train on several devices."""
    found: dict[tuple[object, ...], Setting] = {}
    for case, strategy in cases:
        if case.role != "floor" and case.world_size > 1:
            axes = tuple(getattr(case.layout, name) > 1 for name in ("data", "tensor", "pipeline"))
            key = (case.label, axes, case.layout.shard is None)
            found.setdefault(key, Setting(case=replace(case, topology=None), strategy=strategy))
    return list(found.values())


def settings_in(results: Iterable[Result]) -> list[Setting]:
    """Those that were measured."""
    return settings_of((r.case, r.strategy) for r in results if r.status == "ok")


def settings_in_suite(cases: Iterable[Case]) -> list[Setting]:
    """Those of a suite that has not run."""
    return settings_of(
        (case, implementation.load(case.implementation).strategy_of(case.options))
        for case in cases
        if case.implementation != "reference"
    )


def over_another_link(found: Sequence[Candidate], place: Place) -> list[Candidate]:
    """The candidates that were measured with as many devices, on any nodes: what they hold and send does not depend on
    a link, their time does. One of each label, from the most similar place."""
    alike: dict[tuple[str, str], Candidate] = {}
    measured = [one for one in found if one.basis == "measured" and one.place.num_devices == place.num_devices]
    for one in sorted(measured, key=lambda one: one.place.num_nodes != place.num_nodes):
        alike.setdefault((one.label, one.layout), one)
    return [
        replace(
            one,
            place=place,
            basis="another link",
            units_per_second=None,
            busy_ratio=None,
            exposed_ratio=None,
            bubble_ratio=None,
            node_bytes=None,
        )
        for one in alike.values()
        if one.status == "ok"
    ]


def foreseen(
    workload: str,
    precision: str,
    machine: str,
    place: Place,
    settings: Sequence[Setting],
    *,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Candidate]:
    """Each setting on `place` by its closed forms and dry runs; those that cannot run there, with the reason.
    ValueError for a workload that cannot be loaded."""
    work = in_precision(models.load(workload), precision)
    found = []
    for setting in settings:
        case = setting.on(place)
        if case is None:
            continue
        pipelined = case.layout.pipeline > 1 and work.training.num_micro_batches == 1
        micro_batches = {"num_micro_batches": _micro_batches(case, workload)} if pipelined else {}
        text = models.with_options(workload, **micro_batches)
        case = replace(case, workload=text, precision=precision)
        on_progress(f"predicting {case.label} {case.layout}")
        found.append(_foreseen(case, setting.strategy, machine))
    return found


def _micro_batches(case: Case, workload: str) -> int:
    """As many as there are samples, at most four a stage."""
    return min(models.load(workload).training.global_batch_size, 4 * case.layout.pipeline)


def _loaded(name: str) -> tuple[type[implementation.Implementation] | None, str]:
    """The implementation, or why it cannot be used here."""
    try:
        kind = implementation.load(name)
        missing = kind.unavailable()
    except Exception as error:  # whatever a third-party library raises while it is imported
        missing = f"{type(error).__name__}: {error}"
        return None, missing
    return (None, missing) if missing else (kind, "")


def _foreseen(case: Case, strategy: str, machine: str) -> Candidate:
    status, reason, metrics = "ok", "", {}
    other_work = None
    workload = in_precision(models.load(case.workload), case.precision)
    kind, missing = _loaded(case.implementation)
    if kind is None:
        status, reason = "unavailable", missing
    elif refusal := kind.unsupported(workload, case.layout, _CPU, case.options):
        status, reason = "unsupported", refusal
    else:
        other_work = kind.other_work(workload, case.layout, case.options)
        metrics = predicted(workload, kind, case.layout, case.options)
        wire_bytes = kind.predicted_wire_bytes(workload, registry(workload), case.layout, case.options)
        if wire_bytes is not None:
            metrics["communication.bytes_per_step"] = float(wire_bytes)
    # One reading of a case's name and place, whether it ran or not.
    result = Result(
        case=case,
        status="unsupported",
        strategy=strategy,
        environment={"machine_fingerprint": machine},
        other_work=other_work,
    )
    peak = metrics.get("memory.predicted_peak_bytes")
    return replace(
        candidates([result])[0],
        work=work_of(case.workload),
        basis="predicted",
        memory_basis="predicted",
        status=status,
        reason=reason,
        peak_bytes=peak,
        state_bytes={name: metrics[key] for name in CATEGORIES if (key := f"memory.predicted_{name}_bytes") in metrics},
        sent_bytes=metrics.get("communication.bytes_per_step"),
    )
