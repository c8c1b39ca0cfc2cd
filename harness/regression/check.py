"""The check: one suite run, case by case, against its machine's history and the accepted values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from harness.regression.accepted_values import Accepted, Place
from harness.regression.exact_figures import exact_findings, exact_values
from harness.regression.history import STEP_SECONDS, CaseRun, nights_of
from harness.regression.time_history import MIN_NIGHTS, TimeChange, last_night
from harness.regression.verdicts import MOVED, NOMINATED, RED, Finding, Verdict, worst

_REGRESSIONS_OF_A_MACHINE = 3  # fewer may well be the code's


@dataclass(frozen=True, kw_only=True)
class CaseVerdict:
    """A case with all that was found of it; its `verdict` is the worst."""

    run: CaseRun
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    @property
    def time(self) -> Finding | None:
        return next((finding for finding in self.findings if finding.figure == STEP_SECONDS), None)

    @property
    def moved(self) -> bool:
        """Whether there is anything to accept."""
        return any(finding.verdict in MOVED for finding in self.findings)


@dataclass(frozen=True, kw_only=True)
class Check:
    """The verdicts on one suite run, the worst first, and what is to be said of them together."""

    suite: str
    suite_run: str
    cases: tuple[CaseVerdict, ...]
    notes: tuple[str, ...]

    @property
    def is_red(self) -> bool:
        return any(case.verdict in RED for case in self.cases)


def check(tonight: Sequence[CaseRun], history: Sequence[CaseRun], accepted: Accepted) -> Check:
    """Judges the cases of one suite run. `history` may hold any runs; those that can be compared are picked out."""
    assert tonight, "a suite run has cases"
    cases = [_case_verdict(run, nights_of(run, history), accepted) for run in tonight]
    return Check(
        suite=tonight[0].suite,
        suite_run=tonight[0].suite_run,
        cases=worst_first(cases),
        notes=tuple(_notes(cases, history, accepted)),
    )


def worst_first(cases: Sequence[CaseVerdict]) -> tuple[CaseVerdict, ...]:
    order = get_args(Verdict)
    return tuple(sorted(cases, key=lambda case: order.index(case.verdict)))


def place_of(run: CaseRun) -> Place:
    """Where the accepted values of its case stand."""
    return run.case_id, run.device


def _case_verdict(run: CaseRun, nights: Sequence[CaseRun], accepted: Accepted) -> CaseVerdict:
    findings: list[Finding] = []
    if run.status == "parity failed":
        text = run.explanation or run.reason or "does not train the model that one process trains"
        findings.append(Finding(figure="status", verdict="parity failed", text=text))
    elif run.status in ("unsupported", "unavailable"):
        findings.append(Finding(figure="status", verdict="insufficient data", text=f"{run.status}: {run.reason}"))
    elif run.status != "ok":
        findings.append(Finding(figure="status", verdict="failed", text=f"{run.status}: {run.reason}"))
    else:
        values = exact_values(run.metrics, run.precision)
        findings += exact_findings(values, accepted.values.get(place_of(run), {}))
        if STEP_SECONDS in run.metrics:
            findings.append(_time_finding(run, nights, accepted.times.get(place_of(run), 0.0)))
        elif nights:  # else nobody asked for its time
            text = f"step time: not measured, {len(nights)} nights before have it, the last one {nights[-1].suite_run}"
            findings.append(_time("suspect", text))
    return CaseVerdict(run=run, findings=tuple(findings))


def _time_finding(run: CaseRun, nights: Sequence[CaseRun], accepted_time: float) -> Finding:
    """The step's time, in units of the canary, against the nights before. `accepted_time`: since the epoch."""
    if run.relative_seconds is None:
        return _time("insufficient data", "step time: no canary was measured in its session")
    accepted = min(sum(night.started < accepted_time for night in nights), len(nights) - 1)
    logarithms = [math.log(night.relative_seconds) for night in nights if night.relative_seconds is not None]
    change = last_night(logarithms, accepted=accepted)
    if change.verdict == "insufficient data":
        text = f"step time: night {len(nights)} on machine {run.machine}, history speaks from {MIN_NIGHTS} on"
        return _time(change.verdict, text)
    if change.since is None:
        return _time("ok", f"step time: {change.shift:+.1%} against its level", change.shift)
    return _time_change(run, nights, change, change.since)


def _time_change(run: CaseRun, nights: Sequence[CaseRun], change: TimeChange, since: int) -> Finding:
    """What has moved, since when, and what changed with it."""
    words = "slower" if change.shift > 0 else "faster"
    first = nights[since]
    between = f", commit {nights[since - 1].commit[:8] or '-'} -> {first.commit[:8] or '-'}"
    text = f"step time: {abs(change.shift):.1%} {words} since {first.suite_run}{between}"
    verdict = change.verdict
    commits, no_commits = _commits(nights[since - 1], run)
    changes = environment_changes(nights, since)
    if changes and verdict in MOVED:
        shift = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changes.items())
        family = run.implementation.partition(".")[0]
        if verdict == "regressed" and family in changes:
            before, after = changes[family]
            commits, no_commits = None, f"{family} is another version; `meshmark compare --peer` times two of them"
            text = f"{family} {after} is slower than {family} {before}; {text}; environment shift: {shift}"
        else:
            verdict, text = "environment shift", f"environment shift: {shift}; {text}"
    finding = _time(verdict, text, change.shift, first.suite_run)
    return replace(finding, commits=commits, no_commits=no_commits) if verdict in NOMINATED else finding


def _commits(before: CaseRun, now: CaseRun) -> tuple[tuple[str, str] | None, str]:
    """Two commits that can be timed in turns, or None and why not."""
    for run in (before, now):
        if not run.commit:
            return None, f"the commit of {run.suite_run} is not known"
        if run.dirty:
            return None, f"{run.suite_run} ran with local changes to {run.commit[:8]}"
    if before.commit == now.commit:
        return None, f"both nights ran {now.commit[:8]}"
    return (before.commit, now.commit), ""


def _time(verdict: Verdict, text: str, shift: float | None = None, since: str | None = None) -> Finding:
    return Finding(figure=STEP_SECONDS, verdict=verdict, text=text, shift=shift, since=since)


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


def _notes(cases: Sequence[CaseVerdict], history: Sequence[CaseRun], accepted: Accepted) -> Iterator[str]:
    yield from _machine_notes(cases)
    improved = sum(case.verdict == "improved" for case in cases)
    if improved:
        yield f"{improved} better than before: `meshmark accept` holds the next ones to it"
    new = [case for case in cases if _has_news(case.run, accepted)]
    if new:
        yield f"{len(new)} with exact figures that nothing is held against yet: `meshmark accept` takes them down"
    if missing := _missing(cases, history):
        yield f"{missing} of the suite run before are not in this one"


def _has_news(run: CaseRun, accepted: Accepted) -> bool:
    known = accepted.values.get(place_of(run), {})
    return run.status == "ok" and bool(exact_values(run.metrics, run.precision).keys() - known.keys())


def _machine_notes(cases: Sequence[CaseVerdict]) -> Iterator[str]:
    """The tell-tale of a machine that is not the one its fingerprint says: nearly everything slower, nothing faster."""
    by_machine: dict[str, list[Verdict]] = {}
    for case in cases:
        if case.time is not None and case.time.verdict != "insufficient data":
            by_machine.setdefault(case.run.machine, []).append(case.time.verdict)
    for machine, verdicts in by_machine.items():
        slower = verdicts.count("regressed")
        if slower >= _REGRESSIONS_OF_A_MACHINE and 2 * slower > len(verdicts) and "improved" not in verdicts:
            yield (
                f"{slower} of {len(verdicts)} times on machine {machine} regressed and none improved: look at the "
                "machine first; its fingerprint may stand for two"
            )


def _missing(cases: Sequence[CaseVerdict], history: Sequence[CaseRun]) -> int:
    """How many cases the suite run before had that this one has not."""
    tonight = {case.run.case_id for case in cases}
    began = min(case.run.started for case in cases)
    suite_run = cases[0].run.suite_run
    earlier = [run for run in history if run.started < began and run.suite_run != suite_run]
    if not earlier:
        return 0
    last = max(earlier, key=lambda run: run.started).suite_run
    return len({run.case_id for run in earlier if run.suite_run == last} - tonight)
