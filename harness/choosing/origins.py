"""Origins: on which machines, with which software and in which suite runs figures were measured, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness import suites
from harness.measured_on import commit_of, device_of
from harness.result import Result

MACHINE = "machine_fingerprint"
_MOST_NAMES = 4  # of suite runs and commits


def machine_of(result: Result) -> str:
    """Its fingerprint; empty for a case that never started."""
    return str(result.environment.get(MACHINE) or "")


def machines(results: Iterable[Result]) -> dict[str, str]:
    """What is known of each machine, by its fingerprint: `a processor, 2 cores, torch 2.13.0`, and every torch that it
    had."""
    parts: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for result in results:
        if environment := result.environment:
            devices, torches = parts.setdefault(machine_of(result), ({}, {}))
            devices.setdefault(device_of(environment))
            torches.setdefault(str(environment.get("torch") or ""))
    return {
        machine: _listed([_joined(devices), _joined(f"torch {torch}" if torch else "" for torch in torches)])
        for machine, (devices, torches) in parts.items()
    }


def on_machines(results: Sequence[Result]) -> list[str]:
    """A line for each machine, which is told from the others by its fingerprint."""
    found = machines(results)
    many = len(found) > 1
    lines = [
        ": ".join(part for part in (f"machine {machine or 'not known'}" if many else "", words) if part)
        for machine, words in found.items()
    ]
    return [line for line in lines if line]


def commits(results: Iterable[Result]) -> str:
    """`commit 0123456789`, all that there are: `commits 0123456789 and abcdef0123 with local changes`."""
    found = dict.fromkeys(commit for result in results if (commit := commit_of(result.environment)))
    return f"commit{'s' if len(found) > 1 else ''} {_last(list(found))}" if found else ""


def suite_runs(results: Iterable[Result]) -> str:
    """The last few by name."""
    return _last([name for name in dict.fromkeys(r.suite_run or r.suite for r in results) if name])


def completed(results: Iterable[Result]) -> list[str]:
    """A sentence for each suite of which several runs make up for each other, or some cases are nowhere: `suite
    scaling: 2 cases of scaling-3, 18 of scaling-1`."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in sorted(results, key=lambda result: result.started):
        if result.suite:
            groups.setdefault((result.suite, machine_of(result)), []).append(result)
    told = []
    for (suite, _), members in groups.items():
        latest = {replace(one.case, comparison="").id: one for one in members}
        counts: dict[str, int] = {}
        for one in sorted(latest.values(), key=lambda result: result.started, reverse=True):
            counts[one.suite_run] = counts.get(one.suite_run, 0) + 1
        num_lacking = _num_lacking(suite, members)
        if len(counts) > 1 or num_lacking > 0:
            (first, count), *others = counts.items()
            parts = [f"{_cases(count)} of {first}", *(f"{number} of {name}" for name, number in others)]
            lacking = f"; {_cases(num_lacking)} of the suite {'was' if num_lacking == 1 else 'were'} not measured"
            told.append(f"suite {suite}: {', '.join(parts)}{lacking if num_lacking > 0 else ''}")
    return told


def _num_lacking(suite: str, members: Sequence[Result]) -> int:
    """How many cases nobody measured of the suite as it was last. What is no longer in it makes up for none: by the
    suite at hand where that is as large still, else by the runs back to one that had all of its own."""
    num_cases, runs = members[-1].num_suite_cases, _runs(members)
    if len(current := _cases_at_hand(suite)) == num_cases:
        return len(current - {one.case.id for one in members})
    known: set[str] = set()
    for of_run in reversed(runs):
        own = {one.case.id for one in of_run}
        known |= own
        if len(own) >= of_run[-1].num_suite_cases:
            break
    return num_cases - len(known)


def _runs(members: Sequence[Result]) -> list[list[Result]]:
    """By suite run, the last one last."""
    found: dict[str, list[Result]] = {}
    for one in members:
        found.setdefault(one.suite_run, []).append(one)
    return sorted(found.values(), key=lambda of_run: of_run[0].started)


def _cases_at_hand(suite: str) -> set[str]:
    """The ids of the cases of the suite of that name; none where it is not among ours, or cannot be loaded."""
    try:
        return {case.id for case in suites.load(suite).cases} if suite in suites.names() else set()
    except ValueError:
        return set()


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"


def _last(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[-_MOST_NAMES:]) + (f" and {more} more" if more > 0 else "")


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(text for text in texts if text)


def _joined(texts: Iterable[str]) -> str:
    return " and ".join(text for text in texts if text)
