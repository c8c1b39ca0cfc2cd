"""The check: one suite run, case by case, against its machine's history and the accepted values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from harness.regression.accepted_values import Accepted, Place
from harness.regression.exact_figures import exact_findings, exact_values
from harness.regression.history import STEP_SECONDS, CaseRun, last_ok, nights_of
from harness.regression.time_finding import time_finding
from harness.regression.verdicts import RED, Finding, Verdict, worst

_REGRESSIONS_OF_A_MACHINE = 3  # fewer may well be the code's


@dataclass(frozen=True, kw_only=True)
class CaseVerdict:
    """A case with all that was found of it; its `verdict` is the worst. `last_ok`: of one that cannot run any more, the
    last run in which it could, unless its absence was accepted."""

    run: CaseRun
    findings: tuple[Finding, ...]
    last_ok: CaseRun | None = None

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    @property
    def time(self) -> Finding | None:
        return next((finding for finding in self.findings if finding.figure == STEP_SECONDS), None)

    @property
    def moved(self) -> bool:
        """Whether there is anything to accept."""
        return any(finding.is_acceptable for finding in self.findings)


@dataclass(frozen=True, kw_only=True)
class Check:
    """The verdicts on one suite run, the worst first, and what is to be said of them together. `doubted_machines` may
    not be what their fingerprints say."""

    suite: str
    suite_run: str
    cases: tuple[CaseVerdict, ...]
    notes: tuple[str, ...]
    doubted_machines: frozenset[str] = frozenset()

    @property
    def is_red(self) -> bool:
        return any(case.verdict in RED for case in self.cases)


def check(tonight: Sequence[CaseRun], history: Sequence[CaseRun], accepted: Accepted) -> Check:
    """Judges the cases of one suite run. `history` may hold any runs; those that can be compared are picked out."""
    assert tonight, "a suite run has cases"
    machines = {run.machine for run in tonight if run.machine}
    cases = [_case_verdict(run, nights_of(run, history), last_ok(run, machines, history), accepted) for run in tonight]
    doubted = _doubted(cases)
    return Check(
        suite=tonight[0].suite,
        suite_run=tonight[0].suite_run,
        cases=worst_first(cases),
        notes=tuple(_notes(cases, doubted, history, accepted)),
        doubted_machines=frozenset(doubted),
    )


def worst_first(cases: Sequence[CaseVerdict]) -> tuple[CaseVerdict, ...]:
    order = get_args(Verdict)
    return tuple(sorted(cases, key=lambda case: order.index(case.verdict)))


def place_of(run: CaseRun) -> Place:
    """Where the accepted values of its case stand."""
    return run.case_id, run.device


def _case_verdict(
    run: CaseRun, nights: Sequence[CaseRun], last_ok_run: CaseRun | None, accepted: Accepted
) -> CaseVerdict:
    findings: list[Finding] = []
    lost_since = None
    if run.status == "parity failed" == run.expected:
        findings.append(Finding(figure="status", verdict="ok", text="parity failed, as expected"))
    elif run.status == "parity failed":
        text = run.explanation or run.reason or "does not train the model that one process trains"
        findings.append(Finding(figure="status", verdict="parity failed", text=text))
    elif run.status in ("unsupported", "unavailable"):
        lost_since = _unless_accepted(last_ok_run, accepted)
        findings.append(_not_run(run, lost_since))
    elif run.status != "ok":
        findings.append(Finding(figure="status", verdict="failed", text=f"{run.status}: {run.reason}"))
    else:
        values = exact_values(run.metrics, run.precision, run.parity_steps)
        findings += exact_findings(values, accepted.values.get(place_of(run), {}), run.parity_steps)
        if STEP_SECONDS in run.metrics:
            findings.append(time_finding(run, nights, accepted.times.get(place_of(run), 0.0)))
        elif nights and nights[-1].started >= accepted.times.get(place_of(run), 0.0):  # else nobody asks for its time
            text = f"step time: not measured, {len(nights)} nights before have it, the last one {nights[-1].suite_run}"
            findings.append(Finding(figure=STEP_SECONDS, verdict="suspect", text=text, is_absence=True))
    return CaseVerdict(run=run, findings=tuple(findings), last_ok=lost_since)


def _unless_accepted(last_ok_run: CaseRun | None, accepted: Accepted) -> CaseRun | None:
    if last_ok_run is None or accepted.absences.get(place_of(last_ok_run), 0.0) > last_ok_run.started:
        return None
    return last_ok_run


def _not_run(run: CaseRun, last_ok_run: CaseRun | None) -> Finding:
    """One that has not run here is nobody's trouble. One that has may have been lost with a broken installation; where
    our own code refuses it, it is that code which is worse."""
    if last_ok_run is None:
        return Finding(figure="status", verdict="insufficient data", text=f"{run.status}: {run.reason}")
    text = (
        f"ran until {last_ok_run.suite_run}, tonight {run.status}: {run.reason}; where that is intended, "
        "`meshmark accept`"
    )
    verdict: Verdict = "failed" if run.status == "unsupported" else "suspect"
    return Finding(figure="status", verdict=verdict, text=text, is_absence=True)


def _notes(
    cases: Sequence[CaseVerdict], doubted: Mapping[str, str], history: Sequence[CaseRun], accepted: Accepted
) -> Iterator[str]:
    yield from doubted.values()
    improved = sum(case.verdict == "improved" for case in cases)
    if improved:
        yield f"{improved} better than before: `meshmark accept` holds the next ones to it"
    new = [case for case in cases if _has_news(case.run, accepted)]
    if new:
        where = f" in {accepted.file.absolute()}" if accepted.file else ""
        yield (
            f"{len(new)} with exact figures that nothing is held against yet{where}: `meshmark accept` takes them down"
        )
    if missing := _missing(cases, history):
        yield f"{missing} of the suite run before are not in this one"


def _has_news(run: CaseRun, accepted: Accepted) -> bool:
    known = accepted.values.get(place_of(run), {})
    return run.status == "ok" and bool(exact_values(run.metrics, run.precision, run.parity_steps).keys() - known.keys())


def _doubted(cases: Sequence[CaseVerdict]) -> dict[str, str]:
    """The tell-tale of a machine that is not the one its fingerprint says: nearly everything slower, nothing faster.
    Such machines, with what is to be said of them."""
    doubted = {}
    by_machine: dict[str, list[Verdict]] = {}
    for case in cases:
        if case.time is not None and case.time.verdict != "insufficient data":
            by_machine.setdefault(case.run.machine, []).append(case.time.verdict)
    for machine, verdicts in by_machine.items():
        slower = verdicts.count("regressed")
        if slower >= _REGRESSIONS_OF_A_MACHINE and 2 * slower > len(verdicts) and "improved" not in verdicts:
            doubted[machine] = (
                f"{slower} of {len(verdicts)} times on machine {machine} regressed and none improved: look at the "
                "machine first; its fingerprint may stand for two"
            )
    return doubted


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
