"""Data: results as studies, one for each piece of work on a machine, with what every page asks of a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness.choosing.amounts import three_digits
from harness.choosing.candidates import (
    SINGLE,
    Candidate,
    Place,
    candidates,
    label_of,
    latest,
    strategy_of,
)
from harness.choosing.origins import machine_of
from harness.choosing.predictions import over_another_link
from harness.choosing.work import settings_of, shown, work_of
from harness.regression.history import CaseRun
from harness.result import Result

MIB = 2**20
FLOOR = "compute_only"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One case as pages show it."""

    result: Result
    candidate: Candidate | None  # None: a floor, which trains nothing

    @property
    def label(self) -> str:
        """What it is, and whether it does another work than the recipe's."""
        return f"{label_of(self.result)} (other work)" if self.result.other_work else label_of(self.result)

    @property
    def settings(self) -> str:
        """How it goes through its batch, where that is not at once."""
        return settings_of(self.result.case.workload)

    @property
    def label_without_settings(self) -> str:
        """That of a measure."""
        return self.label.removesuffix(self.settings).strip() if self.settings else self.label

    @property
    def strategy(self) -> str:
        return FLOOR if self.result.case.role == "floor" else strategy_of(self.result)

    @property
    def family(self) -> str:
        return self.result.case.implementation.partition(".")[0]

    @property
    def place(self) -> Place:
        topology = self.result.case.placed
        return Place(
            num_devices=self.result.case.world_size,
            num_nodes=topology.num_nodes,
            link_mbits=topology.link_mbits,
            delay_ms=topology.delay_ms,
        )

    @property
    def is_measured(self) -> bool:
        return self.result.status in ("ok", "parity failed")

    @property
    def is_a_measure(self) -> bool:
        """Whether others may be held against it: it trains what the recipe says."""
        return self.result.is_a_measure and self.result.case.role != "floor"

    @property
    def is_greyed(self) -> bool:
        return not self.result.is_a_measure

    @property
    def unit(self) -> str:
        return "samples" if "throughput.samples_per_second" in self.result.metrics else "tokens"

    def metric(self, name: str) -> float | None:
        return self.result.metrics.get(name)


@dataclass(frozen=True, kw_only=True)
class Study:
    """One piece of work, in one precision, on one machine: what can be compared. `candidates` also has what was
    foreseen and, for links between nodes, what was measured over another one."""

    work: str
    precision: str
    machine: str
    cores: int | None
    runs: tuple[Run, ...]
    candidates: tuple[Candidate, ...]
    nights: tuple[CaseRun, ...] = ()

    @property
    def title(self) -> str:
        return f"{shown(self.work)}, {self.precision}"

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(run.result.suite for run in self.runs if run.result.suite))

    def by_place(self, *, wanted: Callable[[Run], bool] = lambda run: True) -> list[tuple[Place, list[Run]]]:
        """The runs of each place, the fewest devices first."""
        groups: dict[Place, list[Run]] = {}
        for run in filter(wanted, self.runs):
            groups.setdefault(run.place, []).append(run)
        return sorted(groups.items(), key=lambda item: place_order(item[0]))


def place_order(place: Place) -> tuple[float, ...]:
    """Devices, nodes, then the faster link first."""
    rate = float("inf") if place.link_mbits is None else place.link_mbits
    return (place.num_devices, place.num_nodes, -rate, place.delay_ms)


def studies(
    results: Iterable[Result], *, predicted: Sequence[Candidate] = (), nights: Sequence[CaseRun] = ()
) -> list[Study]:
    """The studies in these results, those with most cases first. Of a case that several runs have, the latest one
    counts."""
    kept = latest(results)
    found = {(one.case_id, one.machine): one for one in candidates(kept)}
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in kept:
        key = (work_of(result.case.workload), result.case.precision, machine_of(result))
        groups.setdefault(key, []).append(result)
    made: list[Study] = []
    for (work, precision, machine), members in groups.items():
        own = [one for one in found.values() if (one.work, one.precision, one.machine) == (work, precision, machine)]
        own += [one for one in predicted if (one.work, one.precision, one.machine) == (work, precision, machine)]
        if not own:
            continue  # floors alone
        ids = {result.case.id for result in members}
        made.append(
            Study(
                work=work,
                precision=precision,
                machine=machine,
                cores=next((_cores(r) for r in members if _cores(r)), None),
                runs=tuple(Run(result=r, candidate=found.get((r.case.id, machine))) for r in members),
                candidates=(*own, *_elsewhere(own)),
                nights=tuple(night for night in nights if night.case_id in ids and night.machine == machine),
            )
        )
    return sorted(made, key=lambda study: (-len(study.runs), study.title))


def _cores(result: Result) -> int | None:
    """What ranks on CPUs share; None on GPUs, of which each rank has one."""
    device = result.environment.get("device") or {}
    cores = result.environment.get("physical_cores") or result.environment.get("logical_cores")
    return int(cores) if cores and device.get("kind", "cpu") == "cpu" else None


def _elsewhere(own: Sequence[Candidate]) -> list[Candidate]:
    """For every number of devices the links that were measured with others alone."""
    places = {one.place for one in own}
    counts = {place.num_devices for place in places if place.num_devices > 1}
    links = {(place.num_nodes, place.link_mbits, place.delay_ms) for place in places}
    wanted = [
        Place(num_devices=count, num_nodes=nodes, link_mbits=mbits, delay_ms=delay)
        for count in counts
        for nodes, mbits, delay in links
        if count % nodes == 0
    ]
    return [one for place in sorted(set(wanted) - places, key=place_order) for one in over_another_link(own, place)]


def same_model(study: Study, others: Iterable[Study], model_of: Callable[[str], str]) -> list[Study]:
    """The studies of the same model, precision and machine, whatever their batch."""
    wanted = (model_of(study.work), study.precision, study.machine)
    return [one for one in others if (model_of(one.work), one.precision, one.machine) == wanted]


def is_alone(run: Run) -> bool:
    """One process, which everything is held against."""
    return run.strategy == SINGLE


def number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else three_digits(value * scale)
