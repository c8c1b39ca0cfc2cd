"""Confirmation: what the history nominates, timed in turns on the last commit before and on tonight's.

A history tells when a level moved, not why: another machine behind the same fingerprint moves it, too. Both commits on
one machine in one hour tell that apart.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import environment
from harness.case import Case
from harness.one_line import one_line
from harness.paired import builds, paired_run
from harness.paired.in_turns import ComparedCase
from harness.paired.paired_report import PairedRun
from harness.regression.check import CaseVerdict, Check, worst_first
from harness.regression.history import CaseRun
from harness.regression.verdicts import NOMINATED, Finding, Verdict

MOST_CASES = 5  # in turns, unless --confirm asks for all: each takes minutes
INTERRUPTED = "timing in turns was interrupted: what it has not said stays as the history says"


class Interrupted(Exception):
    """Confirmation broke off, by `interrupt`; `checked` has what it could say by then."""

    def __init__(self, checked: Check, interrupt: KeyboardInterrupt) -> None:
        super().__init__("confirmation was interrupted")
        self.checked = checked
        self.interrupt = interrupt


def confirm(
    checked: Check,
    cases: Mapping[str, Case],
    repository: Path,
    *,
    machine_of: Callable[[str], str] | None,
    tell: Callable[[str], None],
    keep: Callable[[PairedRun], Path] | None = None,
) -> Check:
    """The check with the word of an A/B on each case whose time is nominated: `regressed` where it confirms that,
    `suspect` where it does not. Where it cannot say (a commit that is not in `repository`, a case that is not among
    `cases` by its id, another device, or by `machine_of` a device, a machine that is not the history's, one that is to
    be looked at first) the verdict stays, and a note has the reason; so it does beyond MOST_CASES, taken as regressed
    first, then slowest. With no `machine_of` all are timed, on whatever machine this is. `keep` puts every time of a
    comparison somewhere. Interrupted after Ctrl-C."""
    outcome = _Outcome()
    try:
        for (commits, device), nominated in _nominated(checked, cases, machine_of, outcome).items():
            chosen = [cases[case_id] for case_id in nominated]
            try:
                opened = builds.of_revisions(commits, repository, tell)
                run = paired_run.run(checked.suite, chosen, opened, device=device, tell=tell)
            except (ValueError, OSError, subprocess.SubprocessError) as error:
                outcome.leave(one_line(error), len(nominated))
                continue
            for compared in run.cases:
                if compared.comparison is None and compared.verdict != "failed":
                    outcome.leave(compared.reason)
                else:
                    outcome.said[compared.case.id] = _said(nominated[compared.case.id], compared)
            if keep is not None:
                outcome.kept.append(_kept(run, keep))
    except KeyboardInterrupt as interrupt:
        outcome.kept.append(INTERRUPTED)
        raise Interrupted(_with_outcome(checked, outcome), interrupt) from None
    return _with_outcome(checked, outcome)


@dataclass(kw_only=True)
class _Outcome:
    """What the pairs say of cases, by their ids; how many were not timed for which reason; notes on those that were."""

    said: dict[str, Finding] = field(default_factory=dict)
    unsaid: dict[str, int] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)

    def leave(self, reason: str, count: int = 1) -> None:
        self.unsaid[reason] = self.unsaid.get(reason, 0) + count


def _nominated(
    checked: Check, cases: Mapping[str, Case], machine_of: Callable[[str], str] | None, outcome: _Outcome
) -> dict[tuple[tuple[str, str], str], dict[str, Finding]]:
    """What can be timed, and shall be: by commits and device, findings by the id of their case."""
    found: list[tuple[Finding, tuple[str, str], CaseRun]] = []
    for case in checked.cases:
        finding, run = case.time, case.run
        if finding is None or finding.since is None or finding.verdict not in NOMINATED:
            continue
        if finding.commits is None:
            outcome.leave(finding.no_commits)
        elif run.case_id not in cases:
            outcome.leave(f"suite {checked.suite} is not at hand, or has no such case")
        elif machine_of is not None and run.machine in checked.doubted_machines:
            outcome.leave(f"machine {run.machine} is to be looked at first; --confirm times them all the same")
        elif machine_of is not None and (here := machine_of(run.device)) != run.machine:
            outcome.leave(f"this machine is {here}, the history is that of {run.machine}")
        else:
            found.append((finding, finding.commits, run))
    if machine_of is not None and len(found) > MOST_CASES:
        found.sort(key=lambda item: (item[0].verdict != "regressed", -(item[0].shift or 0.0)))
        reason = f"{MOST_CASES} others come first (regressed, then slowest); --confirm times all"
        outcome.leave(reason, len(found) - MOST_CASES)
        del found[MOST_CASES:]
    groups: dict[tuple[tuple[str, str], str], dict[str, Finding]] = {}
    for finding, commits, run in found:
        groups.setdefault((commits, run.device), {})[run.case_id] = finding
    return groups


def _kept(run: PairedRun, keep: Callable[[PairedRun], Path]) -> str:
    try:
        return f"every time of {run.a.name[:8]} and {run.b.name[:8]} in turns: {keep(run)}"
    except OSError as error:
        return f"the times of {run.a.name[:8]} and {run.b.name[:8]} in turns are not kept: {one_line(error)}"


def _with_outcome(checked: Check, outcome: _Outcome) -> Check:
    notes = [f"{count} not timed in turns: {reason}" for reason, count in outcome.unsaid.items()]
    judged = worst_first([_with(case, outcome.said) for case in checked.cases])
    return replace(checked, cases=judged, notes=(*checked.notes, *notes, *outcome.kept))


def this_machine() -> Callable[[str], str]:
    """The fingerprint of this machine with a device of some kind, looked up once each."""
    return functools.cache(lambda device: str(environment.describe(device)["machine_fingerprint"]))


def _said(finding: Finding, compared: ComparedCase) -> Finding:
    comparison = compared.comparison
    if comparison is None:
        return replace(finding, verdict="failed", text=f"{finding.text}; in turns it fails: {compared.reason}")
    low, high = comparison.interval
    confirmed = compared.verdict == "regressed"
    verdict: Verdict = "regressed" if confirmed else "suspect"
    word = "confirmed" if confirmed else "not confirmed"
    pairs = f"{comparison.shift:+.1%} ({low:+.1%} to {high:+.1%}) in {comparison.num_pairs} pairs"
    return replace(finding, verdict=verdict, text=f"{finding.text}; {word}: {pairs}", confirmed=confirmed)


def with_note(checked: Check, note: str) -> Check:
    return replace(checked, notes=(*checked.notes, note))


def _with(case: CaseVerdict, said: Mapping[str, Finding]) -> CaseVerdict:
    if case.run.case_id not in said:
        return case
    others = [finding for finding in case.findings if finding is not case.time]
    return replace(case, findings=(*others, said[case.run.case_id]))
