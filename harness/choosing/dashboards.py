"""Dashboards: made from results, laid beside the suite run, and linked from its experiments."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from harness import tracking
from harness.choosing import tracker_views
from harness.choosing.candidates import Candidate, Place, candidates
from harness.choosing.predictions import Setting, foreseen, settings_in
from harness.choosing.sources import case_id, suite_run
from harness.regression.history import CaseRun
from harness.result import Result

ARTIFACT = "dashboard.html"
_NOTE = "mlflow.note.content"
_BEGIN, _END = "<!-- meshmark dashboard -->", "<!-- end of meshmark dashboard -->"


def made(
    results: Sequence[Result],
    nights: Sequence[CaseRun],
    predicted: Sequence[Candidate] = (),
    notes: Sequence[str] = (),
) -> str:
    """The HTML file. ValueError where plotly is not installed, or nothing of the results can be shown."""
    data = importlib.import_module("dashboards.data")
    document = importlib.import_module("dashboards.document")
    found = data.studies(results, predicted=predicted, nights=nights)
    if not found:
        raise ValueError("expected at least one case, found none")
    text: str = document.document(found, results, notes=notes)
    return text


def predictions(
    results: Sequence[Result], device_counts: Sequence[int] | None, on_progress: Callable[[str], None]
) -> list[Candidate]:
    """What is foreseen of each work on other numbers of devices, by itself twice the most that were measured: the best
    measured setting of each strategy."""
    measured = candidates(results)
    found = []
    works = dict.fromkeys((one.work, one.precision, one.machine) for one in measured)
    for work, precision, machine in works:
        own = [one for one in measured if (one.work, one.precision, one.machine) == (work, precision, machine)]
        most = max((one.place.num_devices for one in own if one.status == "ok"), default=0)
        counts = ([2 * most] if most > 1 else []) if device_counts is None else device_counts
        known = {one.place for one in own}
        settings = _best_settings(results, own)
        for count in counts:
            if (place := Place(num_devices=count)) not in known:
                try:
                    found += foreseen(work, precision, machine, place, settings, on_progress=on_progress)
                except (ValueError, OSError) as error:  # a workload whose file is not here
                    on_progress(f"no predictions for {work}: {' '.join(str(error).split())}")
                    break
    return found


def _best_settings(results: Sequence[Result], own: Sequence[Candidate]) -> list[Setting]:
    """Of each strategy the setting that was fastest anywhere in this work, of those that do all of it."""
    fastest: dict[str, Candidate] = {}
    for one in own:
        held = fastest.get(one.strategy)
        does_it = one.status == "ok" and one.other_work is None
        if does_it and (held is None or (one.units_per_second or 0.0) > (held.units_per_second or 0.0)):
            fastest[one.strategy] = one
    wanted = {one.case_id for one in fastest.values()}
    return settings_in(result for result in results if result.case.id in wanted)


def publish(text: str, suite_run_ids: Iterable[str], *, tracking_uri: str | None = None) -> list[str]:
    """Lays the dashboard beside each of these suite runs' other artifacts; every experiment that has cases of them gets
    the view for choosing, and a link to both in its description. The suite runs that took it. ConnectionError if the
    store does not."""
    wanted = set(suite_run_ids)
    runs = [run for run in tracking.read_runs(tracking_uri=tracking_uri) if suite_run(run) in wanted]
    of_suites = [run for run in runs if not case_id(run)]
    for run in of_suites:
        tracking.log_artifact(run["run_id"], ARTIFACT, text, tracking_uri=tracking_uri)
    if not of_suites:
        return []
    latest = max(of_suites, key=lambda run: run["started"])

    def linked(experiment_id: str, name: str, tags: Mapping[str, str]) -> Mapping[str, str]:
        own = [run for run in runs if run["experiment"] == name]
        if not own:
            return {}
        note = described(tags.get(_NOTE, ""), latest, experiment_id if name != latest["experiment"] else None)
        has_cases = any(case_id(run) for run in own)
        return {
            _NOTE: note,
            **({tracker_views.TAG: tracker_views.view(tracker_views.unit_of(own))} if has_cases else {}),
        }

    tracking.change_experiment_tags(linked, tracking_uri=tracking_uri)
    return [suite_run(run) for run in of_suites]


def described(note: str, run: Mapping[str, Any], experiment_id: str | None) -> str:
    """An experiment's description with the links in their place; what people wrote around them stays. `run` has the
    dashboard; `experiment_id` is of the experiment that has the view."""
    own = re.sub(re.escape(_BEGIN) + ".*?" + re.escape(_END), "", note, flags=re.DOTALL).strip()
    where = f"#/experiments/{run['experiment_id']}/runs/{run['run_id']}/artifacts/{ARTIFACT}"
    shown = re.sub(r"[\[\]()<>`*_\\]", " ", suite_run(run))
    links = f"[Dashboard of {shown}]({where}): which strategy to choose."
    if experiment_id is not None:
        view = f"#/experiments/{experiment_id}/runs?viewStateShareKey={tracker_views.KEY}"
        links += f" Here: [table]({view}), [charts]({view}&compareRunsMode=CHART)."
    block = f"{_BEGIN}\n{links}\n{_END}"
    return f"{own}\n\n{block}" if own else block
