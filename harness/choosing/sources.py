"""Where results come from: directories that hold them, or the suite runs of a tracker."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import tracking
from harness.regression import clocks, history
from harness.regression.history import CaseRun
from harness.result import Result, read

_RESULT = "result.json"
_MACHINE = "machine_fingerprint"


def from_directories(directories: Iterable[Path]) -> list[Result]:
    """The results of all of them. ValueError where one holds none."""
    return on_their_machines(result for directory in directories for result in read(directory))


def case_runs_in_store() -> list[dict[str, Any]]:
    """Every case that the tracker has. ConnectionError if it cannot be read."""
    return [run for run in tracking.read_runs() if case_id(run)]


def from_store(runs: Sequence[Mapping[str, Any]], suite_runs: Sequence[str] = ()) -> list[Result]:
    """The results of those suite runs among the tracker's `runs`; of the latest one of each suite where none is named.
    ValueError where there is none, ConnectionError where the tracker cannot be read."""
    wanted = list(suite_runs) or latest_of_each_suite(runs)
    known = {suite_run(run) for run in runs}
    for name in wanted:
        if name not in known:
            some = ", ".join(sorted(known, reverse=True)[:5]) or "none"
            raise ValueError(f"--suite-run {name}: expected a suite run in MLflow, such as {some}")
    if not wanted:
        raise ValueError("expected a suite run in MLflow, found none: run a suite, or name --results")
    chosen = [run["run_id"] for run in runs if suite_run(run) in wanted]
    texts = tracking.read_artifacts(chosen, _RESULT)
    return on_their_machines(Result.from_json(json.loads(text)) for text in texts.values())


def on_their_machines(results: Iterable[Result]) -> list[Result]:
    """A case that never started tells of no machine: it is put on the one where the others of its suite run ran."""
    found = list(results)
    machines = {r.suite_run: r.environment[_MACHINE] for r in found if _MACHINE in r.environment}
    return [
        r
        if _MACHINE in r.environment or r.suite_run not in machines
        else replace(r, environment={**r.environment, _MACHINE: machines[r.suite_run]})
        for r in found
    ]


def nights_from_directories(directories: Iterable[Path]) -> list[CaseRun]:
    """Every case of each directory as a night of its history."""
    return [run for directory in directories for run in history.from_results(read(directory), directory)]


def nights_from_store(runs: Iterable[Mapping[str, Any]], suites: Collection[str]) -> list[CaseRun]:
    """All that the tracker's `runs` have of these suites."""
    return history.from_store(run for run in runs if run.get("tags.suite") in suites)


def latest_of_each_suite(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The suite runs that began last."""
    return [clocks.in_order(began)[-1] for began in _began(runs).values()]


def dated_soundly(
    runs: Sequence[Mapping[str, Any]], named: Collection[str], now: float
) -> tuple[list[Mapping[str, Any]], str | None]:
    """The `runs` but for the suite runs that are dated ahead of `now`, and a sentence that says which these are. Those
    that are `named` stay, and those of a suite that has no others."""
    passed: dict[str, float] = {}
    for began in _began(runs).values():
        if len(ahead := clocks.ahead(began, now)) < len(began):
            passed |= {name: began[name] for name in ahead if name not in named}
    kept = [run for run in runs if suite_run(run) not in passed]
    return kept, clocks.passed_over(passed, passed) if passed else None


def _began(runs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """When each suite run of each suite began."""
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        of_suite = found.setdefault(str(run.get("tags.suite", "")), {})
        of_suite[suite_run(run)] = min(run["started"], of_suite.get(suite_run(run), math.inf))
    return found


def suite_run(run: Mapping[str, Any]) -> str:
    return str(run.get(f"tags.{tracking.SUITE_RUN_TAG}", ""))


def case_id(run: Mapping[str, Any]) -> str:
    return str(run.get(f"tags.{tracking.CASE_ID_TAG}", ""))
