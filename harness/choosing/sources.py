"""Where results come from: directories that hold them, or the suite runs of a tracker."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import tracking
from harness.choosing.origins import MACHINE
from harness.choosing.work import work_of
from harness.regression import clocks, history
from harness.regression.history import CaseRun
from harness.result import Result, read

_RESULT = "result.json"


def from_directories(directories: Iterable[Path]) -> list[Result]:
    """The results of all of them. ValueError where one holds none."""
    return on_their_machines(result for directory in directories for result in read(directory))


def case_runs_in_store() -> list[dict[str, Any]]:
    """Every case that the tracker has. ConnectionError if it cannot be read."""
    return [run for run in tracking.read_runs() if case_id(run)]


def from_store(
    runs: Sequence[Mapping[str, Any]], suite_runs: Sequence[str] = (), machine: str | None = None
) -> list[Result]:
    """The results of those suite runs among the tracker's `runs`; of the latest one of each suite where none is named,
    on the machine whose fingerprint begins with `machine`, on whichever where that is None. ValueError where there is
    none, ConnectionError where the tracker cannot be read."""
    if machine is not None:
        runs = _on_machine(runs, machine)
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
    """A case that never started tells of no machine: it is put on the one where the others of its suite run ran, or
    where nothing started in that, on the one of the suite's run before."""
    found = list(results)
    machines: dict[str, str] = {r.suite_run: r.environment[MACHINE] for r in found if MACHINE in r.environment}
    before: dict[str, str] = {}
    for result in sorted(found, key=lambda result: result.started):
        if result.suite_run in machines:
            before[result.suite] = machines[result.suite_run]
        elif result.suite in before:
            machines[result.suite_run] = before[result.suite]
    return [
        r
        if MACHINE in r.environment or r.suite_run not in machines
        else replace(r, environment={**r.environment, MACHINE: machines[r.suite_run]})
        for r in found
    ]


def nights_from_directories(directories: Iterable[Path]) -> list[CaseRun]:
    """Every case of each directory as a night of its history."""
    return [run for directory in directories for run in history.from_results(read(directory), directory)]


def nights_from_store(runs: Iterable[Mapping[str, Any]], suites: Collection[str]) -> list[CaseRun]:
    """All that the tracker's `runs` have of these suites."""
    return history.from_store(run for run in runs if run.get("tags.suite") in suites)


def latest_of_each_suite(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The suite runs that began last. Where the last one of a suite has but some of its cases, those before it on the
    same machine complete it, back to one that has all; where nothing started in it, on that of the one before."""
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        cases.setdefault(suite_run(run), []).append(run)
    found = []
    for began in _began(runs).values():
        last, *earlier = reversed(clocks.in_order(began))
        found.append(last)
        if not _is_whole(cases[last]):
            told = (_machines(cases[name]) for name in (last, *earlier))
            machines = next(filter(None, told), set[str]())
            for name in earlier:
                if _machines(cases[name]) == machines:
                    found.append(name)
                    if _is_whole(cases[name]):
                        break
    return found


def _is_whole(cases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a suite run has all cases of its suite; one that does not say how many these are is taken for whole."""
    return len({case_id(run) for run in cases}) >= max(int(run.get("tags.suite_cases", 0)) for run in cases)


def _machines(cases: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for run in cases if (name := str(run.get(f"tags.{MACHINE}", "")))}


def _on_machine(runs: Sequence[Mapping[str, Any]], machine: str) -> list[Mapping[str, Any]]:
    """The suite runs on it, with their cases that never started."""
    there = {suite_run(run) for run in runs if str(run.get(f"tags.{MACHINE}", "")).startswith(machine)}
    if not there:
        known = ", ".join(sorted(_machines(runs))) or "none"
        raise ValueError(f"--machine {machine}: expected the fingerprint of a machine in MLflow: {known}")
    return [run for run in runs if suite_run(run) in there]


def places_of_work(runs: Iterable[Mapping[str, Any]]) -> set[tuple[str, str, str]]:
    """Every work, precision and machine that the tracker's `runs` have."""
    return {
        (work_of(run["params.workload"]), run.get("params.precision", ""), run[f"tags.{MACHINE}"])
        for run in runs
        if f"tags.{MACHINE}" in run and "params.workload" in run
    }


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
