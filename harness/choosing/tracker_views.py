"""Tracker views: the columns and charts for choosing, as MLflow keeps a view that somebody shares: a JSON text in the
experiment's tag `mlflow.sharedViewState.<key>`, which `#/experiments/<id>/runs?viewStateShareKey=<key>` opens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

KEY = "meshmark-choose"
TAG = f"mlflow.sharedViewState.{KEY}"
_SECTION = "meshmark-section"
_PEAK = "memory.peak_allocated_bytes.max_rank"
_BARS = (
    "step.median_seconds",
    _PEAK,
    "communication.bytes_per_step",
    "communication.exposed_ratio",
)
_METRICS = (_PEAK, "communication.bytes_per_step", "communication.exposed_ratio", "layout.world_size")


def view(unit: str) -> str:
    """The view's text for cases whose speed is counted in `unit`: tokens or samples."""
    speed = f"throughput.{unit}_per_second"
    charts = [_scatter(_PEAK, speed), *(_bar(name, number) for number, name in enumerate((speed, *_BARS)))]
    state: Mapping[str, Any] = {
        "searchFilter": "tags.role != 'floor'",  # which trains nothing, and would be the fastest of all
        "orderByKey": _column("metrics", speed),
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": [
            _column("tags", "strategy"),
            _column("tags", "status"),
            _column("tags", "other_work"),
            *(_column("metrics", name) for name in (speed, *_METRICS)),
            _column("params", "workload"),
        ],
        "columnOrder": [],
        "columnWidths": {},
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "FIRST_20_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": [
            {
                "uuid": _SECTION,
                "name": "Choosing a strategy",
                "display": True,
                "isReordered": False,
                "deleted": False,
                "isGenerated": False,
                "columns": 2,  # of charts; MLflow's three leave no room for names
            }
        ],
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "autoRefreshEnabled": False,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    return json.dumps(state, separators=(",", ":"))


def unit_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """What these runs, as a tracker gives them, count their speed in."""
    return "samples" if any("metrics.throughput.samples_per_second" in run for run in runs) else "tokens"


def _column(kind: str, name: str) -> str:
    return f"{kind}.`{name}`"


def _chart(kind: str, number: int, name: str, **more: Any) -> Mapping[str, Any]:
    return {
        "uuid": f"meshmark-chart-{kind.lower()}-{number}",
        "type": kind,
        "metricSectionId": _SECTION,
        "deleted": False,
        "isGenerated": False,
        "displayName": name,
        **more,
    }


def _scatter(x: str, y: str) -> Mapping[str, Any]:
    axes = {"xaxis": {"key": x, "type": "METRIC"}, "yaxis": {"key": y, "type": "METRIC"}}
    return _chart("SCATTER", 0, "memory and speed", runsCountToCompare=100, **axes)


def _bar(name: str, number: int) -> Mapping[str, Any]:
    return _chart("BAR", number, name, runsCountToCompare=20, metricKey=name)
