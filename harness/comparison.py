"""What a run compares: its cases side by side, each with what its memory and its time are held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.case import Case
from harness.compared_strategy import compared_as, ours_among, strategies_of
from harness.markdown import code
from harness.result import RESULTS_FILE, Result, read

_STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case in a table; `baseline_seconds` is the step of what its time is compared with, `best_peer` the fastest
    peer, on the same layout, of the strategy as which it is compared."""

    result: Result
    baseline_seconds: float | None
    best_peer: Result | None = None

    @property
    def name(self) -> str:
        """The implementation with its options, and the shard degree where the layout sets one."""
        case = self.result.case
        shard = [] if case.layout.shard is None else [f"shard={case.layout.shard}"]
        return " ".join([case.label, *shard, *(["(floor)"] if case.role == "floor" else [])])

    def metric(self, name: str) -> float | None:
        return self.result.metrics.get(name)

    @property
    def state_bytes(self) -> float | None:
        return _sum(self.metric(f"memory.{name}") for name in _STATES)

    @property
    def predicted_state_bytes(self) -> float | None:
        return _sum(self.metric(f"memory.predicted_{name}") for name in _STATES)

    @property
    def step_ratio(self) -> float | None:
        return self._over(self.baseline_seconds)

    @property
    def peer_ratio(self) -> float | None:
        return None if self.best_peer is None else self._over(self.best_peer.metrics["step.median_seconds"])

    def _over(self, other_seconds: float | None) -> float | None:
        seconds = self.metric("step.median_seconds")
        return None if seconds is None or not other_seconds else seconds / other_seconds


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The cases of one workload, layout (whatever its shard degree), topology and precision."""

    title: str
    rows: tuple[Row, ...]
    baseline: str  # what times are compared with: the floor, or the fastest

    @property
    def rivals(self) -> tuple[Row, ...]:
        """Those that train; the first one is what sentences compare the others with."""
        return tuple(row for row in self.rows if row.result.case.role != "floor")


def read_runs(paths: Sequence[Path]) -> list[Result]:
    """The results of several runs, one after another. ValueError where cases of one comparison lie in two of them:
    times are held against what took turns with them."""
    found: list[Result] = []
    where: dict[str, Path] = {}
    for path in paths:
        results = read_run(path)
        for title in {_title(result.case) for result in results if is_measured(result)}:
            if title in where:
                raise ValueError(f"{path}: expected other comparisons than in {where[title]}, got {title} in both")
            where[title] = path
        found += results
    return found


def read_run(path: Path) -> list[Result]:
    """The results of a run: of a directory, or of the results file in it. ValueError if it is neither."""
    directory = path.parent if path.name == RESULTS_FILE else path
    if not directory.is_dir():
        raise ValueError(f"{path}: expected a results directory or its {RESULTS_FILE}, got neither")
    results = read(directory)
    if not any(is_measured(result) for result in results):
        raise ValueError(
            f"{path}: expected at least one case that was measured beside the reference, got none in {len(results)}"
        )
    return results


def comparisons(results: Sequence[Result]) -> list[Comparison]:
    """What is compared with what. A time is held against the fastest floor of the very same layout, which took turns
    with it; where a comparison has a layout without one, against the fastest case."""
    groups: dict[str, list[Result]] = {}
    for result in filter(is_measured, results):
        groups.setdefault(_title(result.case), []).append(result)
    found = []
    for title, members in groups.items():
        by_layout: dict[str, list[Result]] = {}
        for member in members:
            by_layout.setdefault(str(member.case.layout), []).append(member)
        has_floors = all(any(m.case.role == "floor" for m in same) for same in by_layout.values())
        baselines = {
            layout: min(
                (m.metrics["step.median_seconds"] for m in same if _is_baseline(m, has_floors)),
                default=None,
            )
            for layout, same in by_layout.items()
        }
        rows = tuple(
            Row(
                result=member,
                baseline_seconds=baselines[str(member.case.layout)],
                best_peer=_best_peer(member, by_layout[str(member.case.layout)]),
            )
            for member in members
        )
        found.append(Comparison(title=title, rows=rows, baseline="floor" if has_floors else "fastest"))
    return found


def is_measured(result: Result) -> bool:
    """Whether it has a row: the reference is what is true, not what is compared."""
    return result.case.role != "reference" and result.status in ("ok", "parity failed") and bool(result.metrics)


def _is_baseline(result: Result, has_floors: bool) -> bool:
    """A floor exchanges nothing and has no status to lose; of the others only what does the work counts."""
    serves = result.case.role == "floor" if has_floors else result.is_a_measure
    return "step.median_seconds" in result.metrics and serves


def _best_peer(member: Result, others: Sequence[Result]) -> Result | None:
    """A floor trains nothing, and a peer that trains another model, or does other work, is no measure for one that does
    not."""
    if member.case.role == "floor":
        return None
    strategy = compared_as(member.case, strategies_of(member), ours_among(others))
    peers = (
        other
        for other in others
        if other.case.role == "peer" and other.is_a_measure and other.stands_beside(strategy)
        if "step.median_seconds" in other.metrics
    )
    return min(peers, key=lambda peer: peer.metrics["step.median_seconds"], default=None)


def _title(case: Case) -> str:
    """Shard degrees of one data degree stand side by side; a link that is not this machine's own is named."""
    layout = replace(case.layout, shard=None)
    topology = str(case.placed)
    where = [] if topology == f"1x{case.world_size}" else [topology]
    return ", ".join(filter(None, [code(case.workload), str(layout), *where, case.precision, case.comparison]))


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
