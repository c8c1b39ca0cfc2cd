"""History: each case's step over the canary of its session, night by night, with the levels that the regression gate
sees, the changes of software, and the canary itself."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dashboards.blocks import Block, cell, column, figure, missing, more, plotly_text, row, table, text
from dashboards.data import Run, Study
from harness.regression.change_points import segments
from harness.regression.history import CANARY_SECONDS, CaseRun, environment_changes, nights_of
from harness.regression.time_finding import time_finding
from harness.regression.time_history import MIN_NIGHTS

TITLE = "History"
_FEWEST = 3  # nights make a line
_MOST_FIGURES = 8  # before the others are folded away
_SHIFT = (
    "regressed: the last level against the fastest one; improved: against the one before it; ok: the last night "
    "against its own level; suspect: the last level against the fastest one, or the last night against its own; "
    "environment shift: the level moved with the software, or with the machine under the same code"
)


def blocks(study: Study) -> list[Block]:
    series = [(run, nights) for run in study.runs if (nights := _nights(run, study.nights))]
    series = [(run, nights) for run, nights in series if len(nights) >= _FEWEST]
    if not series:
        suite = (study.suites or ["smoke"])[0]
        found = max((len(_nights(run, study.nights)) for run in study.runs), default=0)
        return [
            missing(
                f"History needs {_FEWEST} nights of a case on this machine, and speaks from {MIN_NIGHTS} on; there "
                f"{'is 1' if found == 1 else f'are {found}'}.",
                f"meshmark run {suite} && meshmark check",
            )
        ]
    series.sort(key=lambda item: -len(item[1]))
    made: list[Block] = [
        text(
            "The median step in units of the canary, fixed work that is timed in each session: what is left is the "
            "code's. Steps in the line are levels; a dashed line is a night when software changed.",
            quiet=True,
        ),
        _table(series),
        _canary(series),
    ]
    drawn = [_figure(run, nights) for run, nights in series]
    made += drawn[:_MOST_FIGURES]
    if rest := drawn[_MOST_FIGURES:]:
        made.append(more(f"{len(rest)} more case{'s' if len(rest) > 1 else ''}", *rest))
    return made


def _nights(run: Run, all_nights: Sequence[CaseRun]) -> list[CaseRun]:
    """Those of its case, the last one's history."""
    own = [night for night in all_nights if night.case_id == run.result.case.id and night.suite == run.result.suite]
    return nights_of(max(own, key=lambda night: night.started), own) if own else []


def _logarithms(nights: Sequence[CaseRun]) -> list[float]:
    return [math.log(night.relative_seconds) for night in nights if night.relative_seconds]


def _date(night: CaseRun) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(night.started))


def _figure(run: Run, nights: Sequence[CaseRun]) -> Block:
    found = segments(_logarithms(nights))
    dates = [_date(night) for night in nights]
    bounds = [*found.starts, len(nights)]
    levels: tuple[list[str | None], list[float | None]] = ([], [])
    for (start, end), level in zip(itertools.pairwise(bounds), found.levels, strict=True):
        levels[0].extend((dates[start], dates[end - 1], None))
        levels[1].extend((math.exp(level), math.exp(level), None))
    layout: dict[str, Any] = {
        "xaxis": {"type": "date"},
        "yaxis": {"title": "canaries"},
        "shapes": [],
        "annotations": [],
    }
    for change in found.change_points:
        layout["annotations"].append(
            {
                "x": dates[change.index],
                "y": math.exp(found.levels[found.starts.index(change.index)]),
                "text": f"{100 * change.shift:+.1f} %",
                "showarrow": False,
                "yanchor": "bottom",
                "xanchor": "left",
                "font": {"color": "@bad" if change.shift > 0 else "@ok"},
            }
        )
    for index, words in _changes(nights):
        layout["shapes"].append(
            {
                "type": "line",
                "x0": dates[index],
                "x1": dates[index],
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": "@quiet", "width": 1, "dash": "dash"},
            }
        )
        layout["annotations"].append(
            {
                "x": dates[index],
                "yref": "paper",
                "y": 1,
                "yanchor": "bottom",
                "showarrow": False,
                "text": plotly_text(words),
                "font": {"color": "@quiet"},
            }
        )
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "nights",
            "showlegend": False,
            "x": dates,
            "y": [night.relative_seconds for night in nights],
            "marker": {"color": f"@{run.strategy}", "size": 5, "opacity": 0.75},
            "text": [plotly_text(f"{night.suite_run}, commit {night.commit[:8] or '-'}") for night in nights],
            "hovertemplate": "%{text}<br>%{y:.4g} canaries<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "level",
            "showlegend": False,
            "x": levels[0],
            "y": levels[1],
            "line": {"color": f"@{run.strategy}", "width": 2},
            "hoverinfo": "skip",
        },
    ]
    return figure(f"{run.label}, {run.place}", traces, layout, height=240)


def _changes(nights: Sequence[CaseRun]) -> Iterator[tuple[int, str]]:
    """The nights when software changed, and what."""
    for index in range(1, len(nights)):
        if nights[index - 1].versions == nights[index].versions and (
            nights[index - 1].environment == nights[index].environment
        ):
            continue
        changes = environment_changes(nights, index)
        yield index, ", ".join(f"{name} {after}" for name, (_, after) in changes.items())


def _canary(series: Sequence[tuple[Run, Sequence[CaseRun]]]) -> Block:
    sessions = {night.suite_run: night for _, nights in series for night in nights}
    nights = sorted(sessions.values(), key=lambda night: night.started)
    return figure(
        "The canary",
        [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "canary",
                "x": [_date(night) for night in nights],
                "y": [1e3 * night.metrics[CANARY_SECONDS] for night in nights],
                "line": {"color": "@quiet", "width": 1},
                "marker": {"size": 4},
                "text": [plotly_text(night.suite_run) for night in nights],
                "hovertemplate": "%{text}<br>%{y:.3g} ms<extra></extra>",
            }
        ],
        {"xaxis": {"type": "date"}, "yaxis": {"title": "ms", "rangemode": "tozero"}},
        note="What the machine was worth in each session: lower is a faster machine.",
        height=180,
    )


def _table(series: Sequence[tuple[Run, Sequence[CaseRun]]]) -> Block:
    columns = [
        column("case", numeric=False),
        column("verdict", numeric=False, help="of time alone, as `meshmark check` judges it without what was accepted"),
        column("shift", unit="%", help=_SHIFT),
        column("nights"),
        column("since", numeric=False, secondary=True),
    ]
    return table(columns, [_line(run, nights) for run, nights in series])


def _line(run: Run, nights: Sequence[CaseRun]) -> Mapping[str, Any]:
    found = time_finding(nights[-1], nights, accepted_time=0.0)
    badge = {"regressed": "bad", "suspect": "bad", "improved": "ok", "ok": "ok"}.get(found.verdict)
    return row(
        cell(run.label, colour=f"@{run.strategy}", under=str(run.place)),
        cell(found.verdict, badge=badge),
        cell(found.shift, "-" if found.shift is None else f"{100 * found.shift:+.1f}"),
        cell(len(nights)),
        cell(found.since),
    )
