"""The finding on a case's time: what has moved since when, and whose doing it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.regression.history import STEP_SECONDS, CaseRun, environment_changes, is_same_code
from harness.regression.time_history import MIN_NIGHTS, TimeChange, last_night
from harness.regression.verdicts import NOMINATED, Finding, Verdict

SAME_CODE = "the same commit ran before and after: the machine changed, not the code"


def time_finding(run: CaseRun, nights: Sequence[CaseRun], accepted_time: float) -> Finding:
    """The step's time, in units of the canary, against the nights before, of which `nights` is all with tonight's.
    `accepted_time`: since the epoch."""
    if run.emulated:
        text = "step time: not judged; its links are emulated, and the canary crosses none"
        return _finding("insufficient data", text)
    if run.relative_seconds is None:
        return _finding("insufficient data", "step time: no canary was measured in its session")
    accepted = min(sum(night.started < accepted_time for night in nights), len(nights) - 1)
    logarithms = [math.log(night.relative_seconds) for night in nights if night.relative_seconds is not None]
    family = _family(run)

    def is_excused(night: int) -> bool:
        changes = environment_changes(nights, night)
        return family not in changes if changes else is_same_code(nights, night)

    change = last_night(logarithms, accepted=accepted, excused=is_excused)
    if change.verdict == "insufficient data":
        text = f"step time: night {len(nights)} on machine {run.machine}, history speaks from {MIN_NIGHTS} on"
        return _finding(change.verdict, text)
    if change.since is None:
        return _finding("ok", f"step time: {change.shift:+.1%} against its level", change.shift)
    return _moved(run, nights, change, change.since)


def _moved(run: CaseRun, nights: Sequence[CaseRun], change: TimeChange, since: int) -> Finding:
    """What has moved, since when, and what changed with it."""
    words = "slower" if change.shift > 0 else "faster"
    first = nights[since]
    text = f"step time: {abs(change.shift):.1%} {words} since {first.suite_run}{_new_commit(nights, since)}"
    if change.verdict == "improved" and (why := _why_not_the_code(nights, since)):
        return _finding("environment shift", f"environment shift: {why}; {text}", change.shift, first.suite_run)
    if change.verdict == "environment shift":
        causes = dict.fromkeys(_why_not_the_code(nights, step.night) for step in change.steps if step.is_excused)
        text = f"environment shift: {', '.join(causes)}; {text}"
        return _finding(change.verdict, text, change.shift, first.suite_run)
    commits, no_commits = _commits(nights[since - 1], run)
    other_version = _slower_version(run, nights, since) if change.verdict == "regressed" else ""
    if other_version:
        commits, no_commits = None, f"{_family(run)} is another version; `meshmark compare --peer` times two of them"
        text = f"{other_version}; {text}; environment shift: {_shifts(nights, since)}"
    for step in change.steps:
        is_later_step_up = change.verdict == "regressed" and step.night != since and step.shift > 0
        if step.is_excused:
            why = f", an environment shift: {_why_not_the_code(nights, step.night)}"
        elif is_later_step_up and (slower := _slower_version(run, nights, step.night)):
            why = f": {slower}"
        elif is_later_step_up and other_version:  # nothing is timed in turns, so that this is said nowhere else
            why = _new_commit(nights, step.night)
        else:
            continue
        text += f"; besides, {step.shift:+.1%} since {nights[step.night].suite_run}{why}"
    finding = _finding(change.verdict, text, change.shift, first.suite_run)
    return replace(finding, commits=commits, no_commits=no_commits) if change.verdict in NOMINATED else finding


def _family(run: CaseRun) -> str:
    return run.implementation.partition(".")[0]


def _why_not_the_code(nights: Sequence[CaseRun], night: int) -> str:
    """Empty where it may well be the code."""
    return _shifts(nights, night) or (SAME_CODE if is_same_code(nights, night) else "")


def _shifts(nights: Sequence[CaseRun], night: int) -> str:
    changes = environment_changes(nights, night)
    return ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changes.items())


def _slower_version(run: CaseRun, nights: Sequence[CaseRun], night: int) -> str:
    """Of the library under test, where a step up came with another one; else empty."""
    family = _family(run)
    versions = environment_changes(nights, night).get(family)
    return "" if versions is None else f"{family} {versions[1]} is slower than {family} {versions[0]}"


def _new_commit(nights: Sequence[CaseRun], night: int) -> str:
    before, first = nights[night - 1], nights[night]
    return f", commit {before.commit[:8] or '-'} -> {first.commit[:8] or '-'}"


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


def _finding(verdict: Verdict, text: str, shift: float | None = None, since: str | None = None) -> Finding:
    return Finding(figure=STEP_SECONDS, verdict=verdict, text=text, shift=shift, since=since)
