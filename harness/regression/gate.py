"""The gate as a person meets it: which suite run is judged, against which history, and what is written down of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harness import result, suites, tracking
from harness.case import Case
from harness.regression import accepted_values, check_report, clocks, history
from harness.regression.acceptance import accept
from harness.regression.check import CaseVerdict, Check, check
from harness.regression.history import CaseRun
from harness.run_record import SUITES_EXPERIMENT

VERDICTS_FILE = "verdicts.md"  # an artifact of the suite run
_NUM_NAMED = 3
# Where tonight's run has died, the latest is last night's: a day old, or some minutes less.
_STALE_SECONDS = 20 * 3600.0


def judged(
    *,
    suite: str | None = None,
    suite_run: str | None,
    results: Path | None,
    accepted_directory: Path | None,
    tracking_uri: str | None = None,
    now: float | None = None,
) -> Check:
    """The check of `suite_run`, by default the latest (of that `suite`), of a results directory or of the store; its
    history is the store's. What is dated ahead of `now` (by itself this machine's clock) is the latest only where all
    is. ValueError if there is no such run, or a file of accepted values is broken; ConnectionError if the store cannot
    be read."""
    now = time.time() if now is None else now
    began: Mapping[str, float]
    if results is not None:
        runs = history.from_results(result.read(results), results)
        began = history.began(run for run in runs if suite in (None, run.suite))
        name = _chosen(suite, suite_run, began, str(results), now)
        tonight = [run for run in runs if run.suite_run == name]
        stored = _stored(tonight[0].suite, tracking_uri)
        ids = {(run.case_id, run.suite_run): run.run_id for run in stored}
        tonight = [replace(run, run_id=ids.get((run.case_id, name), "")) for run in tonight]
    else:
        suites = tracking.read_runs(SUITES_EXPERIMENT, suite=suite, tracking_uri=tracking_uri)
        by_name = {run["tags.meshmark.suite_run"]: run for run in suites}
        began = {name: run["started"] for name, run in by_name.items()}
        name = _chosen(suite, suite_run, began, tracking.store_uri(tracking_uri), now)
        stored = _stored(by_name[name].get("tags.suite", ""), tracking_uri)
        tonight = [run for run in stored if run.suite_run == name]
        if not tonight:
            raise ValueError(f"suite run {name}: expected its cases in the store, found none; `meshmark upload` it")
    checked = check(tonight, stored, _accepted(tonight[0].suite, accepted_directory))
    notes = _notes_on_dates(name, suite_run is None, began, now)
    age_seconds = now - began[name]
    if suite_run is None and results is None and age_seconds > _STALE_SECONDS:
        notes.append(f"{name} began {_shown_age(age_seconds)} ago, and no run after it is there")
    return replace(checked, notes=(*checked.notes, *notes))


def cases_at_hand(checked: Check, results: Path | None) -> dict[str, Case]:
    """The cases of the suite run that can be run again, by their ids: as the results directory tells them, else as the
    suite of that name here has them."""
    if results is not None:
        return {found.case.id: found.case for found in result.read(results)}
    try:
        return {case.id: case for case in suites.load(checked.suite).cases}
    except ValueError:
        return {}


def record_verdicts(checked: Check, *, tracking_uri: str | None = None) -> None:
    """Tags the store's runs with their verdicts, and the suite run with the one word `verdict_on_all` and the page of
    them. ConnectionError if it does not take them."""
    tags = {case.run.run_id: {"verdict": str(case.verdict)} for case in checked.cases if case.run.run_id}
    found = tracking.read_runs(SUITES_EXPERIMENT, suite=checked.suite or None, tracking_uri=tracking_uri)
    of_suite = [run["run_id"] for run in found if run["tags.meshmark.suite_run"] == checked.suite_run]
    tags |= {run_id: {"verdict": verdict_on_all(checked)} for run_id in of_suite}
    tracking.set_tags(tags, tracking_uri=tracking_uri)
    for run_id in of_suite:
        tracking.log_artifact(run_id, VERDICTS_FILE, check_report.markdown(checked), tracking_uri=tracking_uri)


def verdict_on_all(checked: Check) -> str:
    """The suite run in one word: red, suspect or ok."""
    if checked.is_red:
        return "red"
    return "suspect" if any(case.verdict == "suspect" for case in checked.cases) else "ok"


def accept_cases(checked: Check, cases: Sequence[CaseVerdict], accepted_directory: Path | None) -> list[str]:
    """Moves the accepted values of `cases` to what they are in this run; a line for each that has changed."""
    path = accepted_values.file_of(checked.suite, accepted_values.directory_at_hand(accepted_directory))
    accepted, lines = accept(cases, accepted_values.read(path), time.time())
    if lines:
        accepted_values.write(path, checked.suite, accepted)
    return lines


def record_acceptance(
    checked: Check, cases: Sequence[CaseVerdict], now: datetime, *, tracking_uri: str | None = None
) -> None:
    """Tags the store's runs of `cases` as accepted, where they can be. ConnectionError if it does not take them."""
    stamp = now.astimezone(UTC).isoformat(timespec="seconds")
    taken = [case.run.run_id for case in cases if case.run.status == "ok" or case.last_ok is not None]
    tags = {run_id: {"accepted": stamp} for run_id in taken if run_id}
    tracking.set_tags(tags, tracking_uri=tracking_uri)


def _stored(suite: str, tracking_uri: str | None) -> list[CaseRun]:
    return history.from_store(tracking.read_runs(suite=suite or None, tracking_uri=tracking_uri))


def _accepted(suite: str, directory: Path | None) -> accepted_values.Accepted:
    return accepted_values.read(accepted_values.file_of(suite, accepted_values.directory_at_hand(directory)))


def _chosen(suite: str | None, suite_run: str | None, began: Mapping[str, float], place: str, now: float) -> str:
    """The suite run of that name, or the latest; `began` says when each of them did."""
    of_suite = f" of {suite}" if suite else ""
    if not began:
        raise ValueError(f"{place}: expected at least one suite run{of_suite}, found none; `meshmark run` makes one")
    if suite_run is None:
        return clocks.latest(began, now)
    if suite_run not in began:
        latest = ", ".join(clocks.in_order(began)[: -_NUM_NAMED - 1 : -1])
        found = f"{place}, the latest of which are {latest}"
        raise ValueError(f"--suite-run {suite_run}: expected one{of_suite} of {found}")
    return suite_run


def _notes_on_dates(name: str, is_by_default: bool, began: Mapping[str, float], now: float) -> list[str]:
    ahead = clocks.ahead(began, now)
    if name in ahead:
        when = clocks.date(began[name])
        return [f"{name} is dated {when}, ahead of this machine's clock: it counts as later than every other night"]
    return [clocks.passed_over(ahead, began)] if ahead and is_by_default else []


def _shown_age(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.0f} days"
