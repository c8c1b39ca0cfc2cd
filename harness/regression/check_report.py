"""The check's report: for a terminal, as Markdown for a comment under a change, as JSON; and that of the self-test."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.markdown import plain, plain_row
from harness.regression.check import CaseVerdict, Check, worst_first
from harness.regression.paired_comparison import MOST_PAIRS
from harness.regression.self_test import SelfTest
from harness.regression.verdicts import NOMINATED, RED

VERDICT_STYLES = {
    **dict.fromkeys(RED, "bold red"),
    "suspect": "yellow",
    "environment shift": "yellow",
    "improved": "green",
    "insufficient data": "dim",
    "ok": "green",
}


def shown(case: CaseVerdict) -> str:
    """The verdict, and of a time that is slower on whose word: that of both commits in turns, or history's alone."""
    telling = [finding for finding in case.findings if finding.verdict == case.verdict]
    if case.verdict not in NOMINATED or case.time is None or case.time.since is None or telling != [case.time]:
        return case.verdict
    words = {True: "confirmed", False: "not confirmed", None: "by history"}
    return f"{case.verdict} ({words[case.time.confirmed]})"


def summary(checked: Check) -> str:
    """One line: the suite run, and how many cases got which verdict, the worst first."""
    counts = Counter(shown(case) for case in worst_first(checked.cases))
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{'RED' if checked.is_red else 'not red'}: {checked.suite_run}: {told}"


def reasons(case: CaseVerdict) -> list[str]:
    """What its findings say, the ones that made the verdict first; nothing where all is well."""
    telling = [finding for finding in case.findings if finding.verdict != "ok"]
    return [finding.text for finding in sorted(telling, key=lambda finding: finding.verdict != case.verdict)]


def text(checked: Check) -> RenderableType:
    """For a terminal: every case, the worst first."""
    table = Table(box=box.HORIZONTALS, show_edge=False)
    for header in ("verdict", "case", "workload", "why"):
        table.add_column(header, no_wrap=header == "verdict", overflow="fold")
    for case in checked.cases:
        table.add_row(
            Text(shown(case), style=VERDICT_STYLES[case.verdict]),
            Text(case.run.name),
            Text(f"{case.run.workload}, {case.run.precision}"),
            Text("\n".join(reasons(case))),
        )
    return Group(table, Text(), Text(summary(checked)), *(Text(f"note: {note}") for note in checked.notes))


def markdown(checked: Check) -> str:
    """For a comment: the cases that are not ok."""
    lines = [f"**{plain(summary(checked))}**", ""]
    told = [case for case in checked.cases if case.verdict != "ok"]
    if told:
        lines += ["| verdict | case | workload | why |", "|---|---|---|---|"]
    for case in told:
        cells = (shown(case), case.run.name, f"{case.run.workload}, {case.run.precision}", "; ".join(reasons(case)))
        lines.append(plain_row(cells))
    lines += ["", *(f"- {plain(note)}" for note in checked.notes)]
    return "\n".join(lines).rstrip() + "\n"


def to_json(checked: Check) -> dict[str, Any]:
    """Plain values."""
    return {
        "suite": checked.suite,
        "suite_run": checked.suite_run,
        "red": checked.is_red,
        "notes": list(checked.notes),
        "cases": [
            {
                "case_id": case.run.case_id,
                "name": case.run.name,
                "workload": case.run.workload,
                "precision": case.run.precision,
                "machine": case.run.machine,
                "device": case.run.device,
                "verdict": case.verdict,
                "accept": case.moved,
                "findings": [
                    {
                        "figure": finding.figure,
                        "verdict": finding.verdict,
                        "text": finding.text,
                        "shift": finding.shift,
                        "since": finding.since,
                        "commits": list(finding.commits) if finding.commits else None,
                        "confirmed": finding.confirmed,
                    }
                    for finding in case.findings
                ],
            }
            for case in checked.cases
        ],
    }


def self_test_lines(tested: SelfTest) -> list[str]:
    """The measured rates, as Markdown, which a terminal shows as it stands."""
    lines = [
        "| nights without a change | simulated | regressed / 1,000 | suspect / 1,000 | 'vs last night' / 1,000 |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {rate.noise} | {rate.num_nights:,} | {rate.regressed:.1f} | {rate.suspect:.1f} | "
        f"{rate.last_night_rule:.1f} |"
        for rate in tested.false_alarms
    ]
    lines += ["", "| slower by | nights | series | found | median nights to find |", "|---:|---|---:|---:|---:|"]
    lines += [
        f"| {power.slowdown:.0%} | {power.noise} | {power.num_series} | {power.found:.0%} | "
        f"{'-' if power.median_delay_nights is None else f'{power.median_delay_nights:g}'} |"
        for power in tested.powers
    ]
    lines += ["", "| slower by, then mended | nights | series | alarm ended | median nights that took |"]
    lines += ["|---:|---|---:|---:|---:|"]
    lines += [
        f"| {recovery.slowdown:.0%} | {recovery.noise} | {recovery.num_series} | {recovery.ended:.0%} | "
        f"{'-' if recovery.median_delay_nights is None else f'{recovery.median_delay_nights:g}'} |"
        for recovery in tested.recoveries
    ]
    lines += ["", f"| in turns, slower by | comparisons | called regressed | took {MOST_PAIRS} pairs |"]
    lines += ["|---:|---:|---:|---:|"]
    lines += [
        f"| {power.shift:.0%} | {power.num_comparisons} | {power.regressed:.1%} | {power.extended:.0%} |"
        for power in tested.paired
    ]
    lines += ["", tested.limits]
    failures = [f"FAILED: {failure}" for failure in tested.failures]
    sound = "the gate is quiet where nothing changed, finds what did, and lets go of what was mended"
    return [*lines, "", *(failures or [sound])]
