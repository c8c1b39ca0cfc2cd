"""Confirmation: what the history nominates, timed in turns on the last commit before and on tonight's.

A history tells when a level moved, not why: another machine behind the same fingerprint moves it, too. Both commits on
one machine in one hour tell that apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from harness.case import Case
from harness.paired import builds, paired_run
from harness.paired.in_turns import ComparedCase
from harness.regression.check import CaseVerdict, Check, worst_first
from harness.regression.verdicts import Finding, Verdict


def confirm(checked: Check, cases: Mapping[str, Case], repository: Path, *, tell: Callable[[str], None]) -> Check:
    """The check with the word of an A/B on each case whose time is nominated: `regressed` where it confirms that,
    `suspect` where it does not. Where it cannot say (a commit that is not in `repository`, a case that is not among
    `cases` by its id, another device) the verdict stays and the reason is added."""
    groups: dict[tuple[tuple[str, str], str], dict[str, Finding]] = {}
    said: dict[str, Finding] = {}
    for case in checked.cases:
        finding, case_id = case.time, case.run.case_id
        if finding is None or finding.commits is None:
            continue
        if case_id in cases:
            groups.setdefault((finding.commits, case.run.device), {})[case_id] = finding
        else:
            said[case_id] = _unsaid(finding, f"suite {checked.suite} is not at hand, or has no such case")
    for (commits, device), nominated in groups.items():
        chosen = [cases[case_id] for case_id in nominated]
        try:
            opened = builds.of_revisions(commits, repository, tell)
            run = paired_run.run(checked.suite, chosen, opened, device=device, tell=tell)
        except ValueError as error:
            said |= {case_id: _unsaid(finding, str(error)) for case_id, finding in nominated.items()}
        else:
            said |= {compared.case.id: _said(nominated[compared.case.id], compared) for compared in run.cases}
    return replace(checked, cases=worst_first([_with(case, said) for case in checked.cases]))


def _said(finding: Finding, compared: ComparedCase) -> Finding:
    comparison = compared.comparison
    if compared.verdict == "failed":
        return replace(finding, verdict="failed", text=f"{finding.text}; in turns it fails: {compared.reason}")
    if comparison is None:
        return _unsaid(finding, compared.reason)
    low, high = comparison.interval
    verdict: Verdict = "regressed" if compared.verdict == "regressed" else "suspect"
    word = "confirmed" if verdict == "regressed" else "not confirmed"
    pairs = f"{comparison.shift:+.1%} ({low:+.1%} to {high:+.1%}) in {comparison.num_pairs} pairs"
    return replace(finding, verdict=verdict, text=f"{finding.text}; {word}: {pairs}")


def _unsaid(finding: Finding, reason: str) -> Finding:
    return replace(finding, text=f"{finding.text}; not timed in turns: {reason}")


def _with(case: CaseVerdict, said: Mapping[str, Finding]) -> CaseVerdict:
    if case.run.case_id not in said:
        return case
    others = [finding for finding in case.findings if finding is not case.time]
    return replace(case, findings=(*others, said[case.run.case_id]))
