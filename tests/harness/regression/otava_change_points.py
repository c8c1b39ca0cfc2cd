"""Run by the Python that has Apache Otava: series of numbers as JSON on standard input, the indices of its change
points of each on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

from otava.series import AnalysisOptions, Metric, Series


def change_points(values: list[float], options: dict[str, Any]) -> list[int]:
    given = AnalysisOptions()
    for name, value in options.items():
        setattr(given, name, value)
    series = Series("x", None, list(range(len(values))), {"seconds": Metric()}, {"seconds": values}, {})
    return [int(point.index) for point in series.analyze(given).change_points["seconds"]]


request = json.load(sys.stdin)
json.dump([change_points(values, request["options"]) for values in request["series"]], sys.stdout)
