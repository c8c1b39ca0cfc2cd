"""History: what runs of a case say that the gate needs, read from a tracker's runs or from a results directory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.regression.time_history import MAX_NIGHTS
from harness.result import Result
from harness.run_record import RunRecord, case_record

STEP_SECONDS = "step.median_seconds"
CANARY_SECONDS = "canary.seconds"
_VERSION_PREFIXES = ("libraries.", "environment.")


@dataclass(frozen=True, kw_only=True)
class CaseRun:
    """One case in one suite run. `versions` are those of the software it ran with, by name; `run_id` is the tracker's,
    empty where it was read from a directory."""

    case_id: str
    suite_run: str
    suite: str
    started: float  # seconds since the epoch
    name: str  # implementation with its options, and layout
    implementation: str
    workload: str
    precision: str
    status: str
    reason: str
    explanation: str
    device: str
    machine: str  # fingerprint
    environment: str  # fingerprint
    commit: str
    versions: Mapping[str, str]
    metrics: Mapping[str, float]
    dirty: bool = False  # something differed from that commit
    expected: str = "ok"  # or "parity failed", where it is known to train another model
    parity_steps: int = 0  # its loss is that of the last of them
    emulated: bool = False  # links between its nodes are shaped by the kernel
    run_id: str = ""

    @property
    def relative_seconds(self) -> float | None:
        """The median step in units of the canary of its session; None where the case did not end well, or either was
        not measured."""
        step, canary = self.metrics.get(STEP_SECONDS), self.metrics.get(CANARY_SECONDS)
        if self.status != "ok" or not step or not canary or not 0 < step / canary < math.inf:
            return None
        return step / canary


def from_store(runs: Iterable[Mapping[str, Any]]) -> list[CaseRun]:
    """The case runs among a tracker's runs, as harness.tracking.read_runs gives them."""
    found = []
    for run in runs:
        tags = _below("tags.", run)
        if case_id := tags.get("meshmark.case_id"):
            found.append(
                _case_run(
                    case_id=case_id,
                    suite_run=tags["meshmark.suite_run"],
                    started=run["started"],
                    name=run["run_name"],
                    tags=tags,
                    params=_below("params.", run),
                    metrics=_below("metrics.", run),
                    run_id=run["run_id"],
                )
            )
    return found


def from_results(results: Iterable[Result], directory: Path) -> list[CaseRun]:
    """The case runs of a results directory, the same as after its upload."""
    return [_from_record(case_record(result, directory)) for result in results]


def _from_record(record: RunRecord) -> CaseRun:
    last_values = {name: points[-1][1] for name, points in record.series.items()}
    return _case_run(
        case_id=record.case_id,
        suite_run=record.suite_run,
        started=record.started,
        name=record.name,
        tags=record.tags,
        params=record.params,
        metrics={**record.metrics, **last_values},
    )


def _case_run(
    *,
    case_id: str,
    suite_run: str,
    started: float,
    name: str,
    tags: Mapping[str, Any],
    params: Mapping[str, Any],
    metrics: Mapping[str, Any],
    run_id: str = "",
) -> CaseRun:
    versions = {
        key.removeprefix(prefix): str(value)
        for prefix in _VERSION_PREFIXES
        for key, value in params.items()
        if key.startswith(prefix)
    }
    return CaseRun(
        case_id=case_id,
        suite_run=suite_run,
        suite=str(tags.get("suite", "")),
        started=started,
        name=name,
        implementation=str(tags.get("implementation", "")),
        workload=str(params.get("workload", "")),
        precision=str(params.get("precision", "")),
        status=str(tags.get("status", "")),
        reason=str(tags.get("reason", "")),
        explanation=str(tags.get("explanation", "")),
        device=str(tags.get("device", "cpu")),
        machine=str(tags.get("machine_fingerprint", "")),
        environment=str(tags.get("environment_fingerprint", "")),
        commit=str(tags.get("commit", "")),
        dirty=tags.get("dirty") == "true",
        expected=str(params.get("expected", "ok")),
        parity_steps=int(params.get("measurement.parity_steps", 0)),
        emulated=_is_emulated(tags, params),
        versions=versions,
        metrics={key: float(value) for key, value in metrics.items()},
        run_id=run_id,
    )


def _is_emulated(tags: Mapping[str, Any], params: Mapping[str, Any]) -> bool:
    """By its mark, or by its topology: links are shaped on emulated nodes only."""
    is_shaped = params.get("topology.link_mbits", "null") != "null" or float(params.get("topology.delay_ms", 0)) > 0
    return tags.get("emulated") == "true" or is_shaped


def _below(prefix: str, run: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in run.items() if key.startswith(prefix)}


def began(runs: Iterable[CaseRun]) -> dict[str, float]:
    """When each suite run began: the first of its cases."""
    found: dict[str, float] = {}
    for run in runs:
        found[run.suite_run] = min(run.started, found.get(run.suite_run, math.inf))
    return found


def nights_of(tonight: CaseRun, runs: Iterable[CaseRun]) -> list[CaseRun]:
    """The runs of tonight's case on its machine that can be compared by time, oldest first, at most MAX_NIGHTS; the
    last is tonight's, where it was timed. A suite run counts once."""
    nights = {
        run.suite_run: run
        for run in runs
        if (run.case_id, run.suite, run.machine) == (tonight.case_id, tonight.suite, tonight.machine)
        and run.started < tonight.started
        and run.relative_seconds is not None
    }
    nights.pop(tonight.suite_run, None)
    if tonight.relative_seconds is not None:
        nights[tonight.suite_run] = tonight
    return sorted(nights.values(), key=lambda run: run.started)[-MAX_NIGHTS:]


def last_ok(tonight: CaseRun, machines: Collection[str], runs: Iterable[CaseRun]) -> CaseRun | None:
    """The last run before tonight's in which its case ended as expected, if it is among the suite's last MAX_NIGHTS on
    those machines. A case that cannot run tells no machine of its own; with no `machines` any counts."""
    earlier = [
        run
        for run in runs
        if run.suite == tonight.suite and run.started < tonight.started and (not machines or run.machine in machines)
    ]
    starts = began(earlier)
    latest = set(sorted(starts, key=lambda name: starts[name])[-MAX_NIGHTS:])
    as_expected = (
        run
        for run in earlier
        if run.case_id == tonight.case_id
        and run.status == run.expected
        and run.suite_run in latest
        and run.suite_run != tonight.suite_run
    )
    return max(as_expected, key=lambda run: run.started, default=None)


def environment_changes(nights: Sequence[CaseRun], since: int) -> dict[str, tuple[str, str]]:
    """What software changed at night `since`, or one night away from there (that is how well a change point is known):
    name to (before, after), `environment` to fingerprints where nothing that has a name did."""
    for index in (since, since - 1, since + 1):
        if not 0 < index < len(nights):
            continue
        before, after = nights[index - 1], nights[index]
        names = sorted(before.versions.keys() | after.versions.keys())
        changes = {
            name: (before.versions.get(name, "none"), after.versions.get(name, "none"))
            for name in names
            if before.versions.get(name) != after.versions.get(name)
        }
        if not changes and before.environment != after.environment:
            changes = {"environment": (before.environment, after.environment)}
        if changes:
            return changes
    return {}


def is_same_code(nights: Sequence[CaseRun], since: int) -> bool:
    """Whether one clean commit ran on both sides of night `since`, and of the nights beside it, of which any may be the
    one when a level moved."""
    around = nights[max(0, since - 2) : since + 2]
    return bool(around[0].commit) and not any(run.dirty or run.commit != around[0].commit for run in around)
