"""Acceptance: what becomes of the accepted values when a person agrees with a suite run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.regression.accepted_values import ACCEPTED_ABSENCE, ACCEPTED_TIME, Accepted
from harness.regression.check import CaseVerdict, place_of
from harness.regression.exact_figures import exact_values
from harness.regression.verdicts import MOVED


def accept(cases: Sequence[CaseVerdict], accepted: Accepted, now: float) -> tuple[Accepted, list[str]]:
    """The accepted values with those of `cases`, and a line for each that has changed.

    Only what is new, has moved or is gone is taken over: neither figures within their tolerance nor a slow creep of the
    time are accepted along with something else. Times count from this suite run on; one that is dated ahead of `now`
    counts as of now, or no later night could be slower. Of a case that is not ok nothing is taken over but that it need
    not run, where it cannot any more.
    """
    values = {place: dict(figures) for place, figures in accepted.values.items()}
    times, absences = dict(accepted.times), dict(accepted.absences)
    began = math.floor(min((case.run.started for case in cases), default=0.0))
    began = min(began, math.floor(now))
    lines = []
    for case in cases:
        run, place = case.run, place_of(case.run)
        if case.last_ok is not None:
            # Not from `began` on: that run may overlap with this one.
            absences[place_of(case.last_ok)] = float(math.ceil(min(run.started, now)))
            lines.append(f"{run.name}: {ACCEPTED_ABSENCE} {run.suite_run} (ran until {case.last_ok.suite_run})")
        if run.status != "ok":
            continue
        known = dict(values.get(place, {}))
        moved = {finding.figure for finding in case.findings if finding.verdict in MOVED}
        for figure in (finding.figure for finding in case.findings if finding.is_absence and finding.figure in known):
            lines.append(f"{run.name}: {figure} {_shown(known[figure])} -> -")
            del values[place][figure]
        for figure, value in exact_values(run.metrics, run.precision, run.parity_steps).items():
            if figure in moved or figure not in known:
                lines.append(f"{run.name}: {figure} {_shown(known.get(figure))} -> {_shown(value)}")
                values.setdefault(place, {})[figure] = value
        if case.time is not None and case.time.is_acceptable:
            times[place] = float(began)
            lines.append(f"{run.name}: {ACCEPTED_TIME} {run.suite_run} ({case.time.text})")
    return Accepted(values=values, times=times, absences=absences), lines


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.12g}"
