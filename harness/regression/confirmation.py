"""Confirmation: what the history nominates, timed in turns on the last commit before and on tonight's.

A history tells when a level moved, not why: another machine behind the same fingerprint moves it, too. Both commits on
one machine in one hour tell that apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from harness import environment
from harness.case import Case
from harness.paired import builds, paired_run
from harness.paired.in_turns import ComparedCase
from harness.regression.check import CaseVerdict, Check, worst_first
from harness.regression.verdicts import NOMINATED, Finding, Verdict


def confirm(
    checked: Check,
    cases: Mapping[str, Case],
    repository: Path,
    *,
    machine_of: Callable[[str], str] | None,
    tell: Callable[[str], None],
) -> Check:
    """The check with the word of an A/B on each case whose time is nominated: `regressed` where it confirms that,
    `suspect` where it does not. Where it cannot say (a commit that is not in `repository`, a case that is not among
    `cases` by its id, another device, or by `machine_of` a device, a machine that is not the history's) the verdict
    stays, and a note has the reason. With None whatever machine this is will do."""
    groups: dict[tuple[tuple[str, str], str], dict[str, Finding]] = {}
    said: dict[str, Finding] = {}
    unsaid: dict[str, int] = {}

    def leave(reason: str, count: int = 1) -> None:
        unsaid[reason] = unsaid.get(reason, 0) + count

    for case in checked.cases:
        finding, case_id, device = case.time, case.run.case_id, case.run.device
        if finding is None or finding.since is None or finding.verdict not in NOMINATED:
            continue
        if finding.commits is None:
            leave(finding.no_commits)
        elif case_id not in cases:
            leave(f"suite {checked.suite} is not at hand, or has no such case")
        elif machine_of is not None and (here := machine_of(device)) != case.run.machine:
            leave(f"this machine is {here}, the history is that of {case.run.machine}")
        else:
            groups.setdefault((finding.commits, device), {})[case_id] = finding
    for (commits, device), nominated in groups.items():
        chosen = [cases[case_id] for case_id in nominated]
        try:
            opened = builds.of_revisions(commits, repository, tell)
            run = paired_run.run(checked.suite, chosen, opened, device=device, tell=tell)
        except ValueError as error:
            leave(str(error), len(nominated))
            continue
        for compared in run.cases:
            if compared.comparison is None and compared.verdict != "failed":
                leave(compared.reason)
            else:
                said[compared.case.id] = _said(nominated[compared.case.id], compared)
    notes = [f"{count} not timed in turns: {reason}" for reason, count in unsaid.items()]
    judged = worst_first([_with(case, said) for case in checked.cases])
    return replace(checked, cases=judged, notes=(*checked.notes, *notes))


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


def _with(case: CaseVerdict, said: Mapping[str, Finding]) -> CaseVerdict:
    if case.run.case_id not in said:
        return case
    others = [finding for finding in case.findings if finding is not case.time]
    return replace(case, findings=(*others, said[case.run.case_id]))
