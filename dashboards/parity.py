"""Parity: whether it is still the same model: the distance of each step's loss from the reference's, and what explains
a gap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dashboards.blocks import (
    DASHES,
    SYMBOLS,
    Block,
    cell,
    column,
    figure,
    heading,
    missing,
    plotly_text,
    row,
    table,
    text,
)
from dashboards.data import Run, Study, is_alone

TITLE = "Parity"
_FIGURES = {
    "loss": "loss_max_relative",
    "gradient_norm": "gradient_norm_max_relative",
    "gradient": "gradient_max_relative",
    "parameter": "parameter_max_relative",
}


def blocks(study: Study) -> list[Block]:
    runs = [run for run in study.runs if run.result.parity is not None and not is_alone(run)]
    if not runs:
        suite = (study.suites or ["smoke"])[0]
        return [missing("No case of this work was held against the reference.", f"meshmark run {suite}")]
    made: list[Block] = [
        text(
            "Each step's loss against one process that does the same work, relative to it. Losses that are equal to "
            "the last bit lie on the bottom line; the shaded band is what is allowed.",
            quiet=True,
        )
    ]
    parted = [run for run in runs if run.result.parity is not None and not run.result.parity.ok]
    made += [_explained(run) for run in parted]
    series = {id(run): _differences(run) for run in runs}
    drawn = [run for run in runs if series[id(run)]]
    if drawn:
        made.append(_figure(drawn, [series[id(run)] for run in drawn]))
    made.append(_table(runs))
    return made


def _explained(run: Run) -> Block:
    parity = run.result.parity
    assert parity is not None
    words = run.result.reason or parity.explanation or "no single factor explains it"
    known = ", as its suite expects" if run.result.is_as_expected else ""
    return heading(f"{run.label} trains another model{known}", f"On {run.place}: {' '.join(words.split())}")


def _differences(run: Run) -> list[float]:
    """Of each step, relative; empty where the losses were not kept."""
    own, true = (
        [float(value) for value in run.result.samples.get(name) or ()] for name in ("losses", "reference_losses")
    )
    return [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(own, true, strict=False)]


def _figure(runs: Sequence[Run], series: Sequence[Sequence[float]]) -> Block:
    allowed = [float(run.result.parity.tolerance.get("loss", 0.0)) for run in runs if run.result.parity]
    tolerance = max((value for value in allowed if value > 0), default=None)
    positive = [value for values in series for value in values if 0 < value < math.inf]
    floor = 10.0 ** (math.floor(math.log10(min([*positive, tolerance or 1.0]))) - 1)
    top = 10.0 ** (math.ceil(math.log10(max([*positive, tolerance or floor]))) + 0.3)
    last = max(len(values) for values in series) - 1
    layout: dict[str, Any] = {
        "xaxis": {"title": "step", "dtick": max(1, last // 10), "range": [-0.15, last + 0.15]},
        "yaxis": {
            "type": "log",
            "title": "relative to the reference",
            "exponentformat": "power",
            "dtick": 1,
            "range": [math.log10(floor) - 0.2, math.log10(top)],
        },
    }
    if tolerance is not None:
        layout["shapes"] = [
            {
                "type": "rect",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": floor / 2,
                "y1": tolerance,
                "fillcolor": "@band",
                "line": {"width": 0},
                "layer": "below",
            }
        ]
        layout["annotations"] = [
            {
                "xref": "paper",
                "x": 0.01,
                "y": math.log10(tolerance),
                "yanchor": "bottom",
                "xanchor": "left",
                "showarrow": False,
                "text": f"allowed: {tolerance:.1e}",
            }
        ]
    traces = [_trace(run, values, floor) for run, values in zip(runs, series, strict=True)]
    return figure("Loss beside the reference's, step by step", traces, layout)


def _trace(run: Run, values: Sequence[float], floor: float) -> Mapping[str, Any]:
    finite = [min(value, 1e300) for value in values]
    equal = ["equal to the last bit" if value == 0 else f"off by {value:.2e}" for value in values]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{run.family} {run.strategy.replace('_', ' ')}",
        "x": list(range(len(finite))),
        "y": [max(value, floor) for value in finite],
        "line": {"color": f"@{run.strategy}", "dash": DASHES.get(run.family, "solid"), "width": 1.5},
        "marker": {"color": f"@{run.strategy}", "symbol": SYMBOLS.get(run.family, "circle"), "size": 7},
        "text": [plotly_text(f"{run.label}, {run.place}: {words}") for words in equal],
        "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
    }


def _table(runs: Sequence[Run]) -> Block:
    columns = [
        column("case", numeric=False),
        column("parity", numeric=False),
        column("lane", numeric=False, secondary=True),
        *(
            column(name.replace("_", " "), help="the largest relative difference, and what is allowed")
            for name in _FIGURES
        ),
        column("worst parameter", numeric=False, secondary=True),
        column("replicas", numeric=False, help="whether what is replicated is equal bit for bit", secondary=True),
    ]
    return table(columns, [_line(run) for run in runs], title="All figures")


def _line(run: Run) -> Mapping[str, Any]:
    parity = run.result.parity
    assert parity is not None
    figures = []
    for name, attribute in _FIGURES.items():
        # Results read back from a file hold "nan" and "inf" as text.
        value, allowed = float(getattr(parity, attribute)), parity.tolerance.get(name)
        under = "" if allowed is None else f"of {float(allowed):.0e}"
        figures.append(
            cell(value if math.isfinite(value) else None, "equal" if value == 0 else f"{value:.1e}", under=under)
        )
    words = (
        "ok" if parity.ok else "FAILED" if parity.first_bad_step is None else f"FAILED at step {parity.first_bad_step}"
    )
    return row(
        cell(run.label, colour=f"@{run.strategy}", mark=SYMBOLS.get(run.family, "circle"), under=str(run.place)),
        cell(words, badge="ok" if parity.ok else "bad"),
        cell(parity.lane),
        *figures,
        cell(parity.worst_parameter),
        cell("equal" if parity.replicas_bit_equal else "differ", badge=None if parity.replicas_bit_equal else "bad"),
    )
