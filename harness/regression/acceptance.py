"""Acceptance: what becomes of the accepted values when a person agrees with a suite run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.regression.accepted_values import ACCEPTED_TIME, Accepted
from harness.regression.check import CaseVerdict, place_of
from harness.regression.exact_figures import exact_values, superseded
from harness.regression.verdicts import MOVED


def accept(cases: Sequence[CaseVerdict], accepted: Accepted, now: float) -> tuple[Accepted, list[str]]:
    """The accepted values with those of `cases`, and a line for each that has changed.

    Only what is new or has moved is taken over: neither figures within their tolerance nor a slow creep of the time are
    accepted along with something else. Times count from this suite run on; one that is dated ahead of `now` counts as
    of now, or no later night could be slower. Cases that are not ok leave everything as it is.
    """
    values = {place: dict(figures) for place, figures in accepted.values.items()}
    times = dict(accepted.times)
    began = math.floor(min((case.run.started for case in cases), default=0.0))
    began = min(began, math.floor(now))
    lines = []
    for case in cases:
        run, place = case.run, place_of(case.run)
        if run.status != "ok":
            continue
        known = values.get(place, {})
        moved = {finding.figure for finding in case.findings if finding.verdict in MOVED}
        for figure, value in exact_values(run.metrics, run.precision, run.parity_steps).items():
            if figure in moved or figure not in known:
                lines.append(f"{run.name}: {figure} {_shown(known.get(figure))} -> {_shown(value)}")
                of_place = values.setdefault(place, {})
                of_place[figure] = value
                for other in superseded(figure, [*of_place]):
                    del of_place[other]
        if case.time is not None and case.time.verdict in MOVED:
            times[place] = float(began)
            lines.append(f"{run.name}: {ACCEPTED_TIME} {run.suite_run} ({case.time.text})")
    return Accepted(values=values, times=times), lines


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.12g}"
