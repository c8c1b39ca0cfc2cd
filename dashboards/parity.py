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
_MOST = 1e300  # that an axis takes; what is more, or no number, is drawn at its top edge
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
    bands = (
        "The darker band is allowed to every case, the lighter one to those whose reference is noisier"
        if len({_allowed(run) for run in runs} - {None}) > 1
        else "The shaded band is what is allowed"
    )
    made: list[Block] = [
        text(
            "Each step's loss against one process that does the same work, relative to it. Losses that are equal to "
            f"the last bit lie on the bottom line. {bands}; a red cross is beyond what its own case is allowed at that "
            "step, one on the top edge off the scale.",
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
    allowed = sorted({value for run in runs if (value := _allowed(run)) is not None})
    positive = [value for values in series for value in values if 0 < value <= _MOST]
    floor = 10.0 ** (math.floor(math.log10(min([*positive, *(allowed or [1.0])]))) - 1)
    top = 10.0 ** (math.ceil(math.log10(max([*positive, *(allowed or [floor])]))) + 0.3)
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
    if allowed:
        least, most = allowed[0], allowed[-1]
        # One band upon the other: what is allowed to every case is the darker for it.
        layout["shapes"] = [_band(floor, limit) for limit in dict.fromkeys((least, most))]
        layout["annotations"] = [_limit(least, "allowed", "bottom")]
        if most > least:
            layout["annotations"] = [
                _limit(least, "allowed to every case", "top"),
                _limit(most, "allowed to some", "bottom"),
            ]
    traces = [_trace(run, values, floor, top) for run, values in zip(runs, series, strict=True)]
    if beyond := [point for run, values in zip(runs, series, strict=True) for point in _beyond(run, values, top)]:
        traces.append(_crosses(beyond))
    return figure("Loss beside the reference's, step by step", traces, layout)


def _allowed(run: Run, step: int = 1) -> float | None:
    """How far a loss may be from the reference's in this case, which depends on its micro-batches too; at the first
    step, 0, that can be less."""
    told = {} if run.result.parity is None else run.result.parity.tolerance
    tolerance = float(told.get("loss", 0.0))
    return None if tolerance <= 0 else float(told.get("first_loss", tolerance)) if step == 0 else tolerance


def _band(floor: float, limit: float) -> Mapping[str, Any]:
    return {
        "type": "rect",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": floor / 2,
        "y1": limit,
        "fillcolor": "@band",
        "line": {"width": 0},
        "layer": "below",
    }


def _limit(limit: float, words: str, side: str) -> Mapping[str, Any]:
    """`side`: which edge of the words lies on the limit."""
    return {
        "xref": "paper",
        "x": 0.01,
        "y": math.log10(limit),
        "yanchor": side,
        "xanchor": "left",
        "showarrow": False,
        "text": f"{words}: {limit:.1e}",
    }


def _drawn(value: float, top: float) -> float:
    """Where it is drawn: what no axis takes at the top edge."""
    return value if value <= _MOST else top


def _trace(run: Run, values: Sequence[float], floor: float, top: float) -> Mapping[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{run.family} {run.strategy.replace('_', ' ')}",
        "x": list(range(len(values))),
        "y": [max(_drawn(value, top), floor) for value in values],
        "line": {"color": f"@{run.strategy}", "dash": DASHES.get(run.family, "solid"), "width": 1.5},
        "marker": {"color": f"@{run.strategy}", "symbol": SYMBOLS.get(run.family, "circle"), "size": 7},
        "text": [_words(run, step, value) for step, value in enumerate(values)],
        "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
    }


def _words(run: Run, step: int, value: float) -> str:
    allowed = _allowed(run, step)
    limit = "" if allowed is None else f", {allowed:.1e} is allowed"
    distance = f"off by {value:.2e}" if math.isfinite(value) else "no finite number"
    told = "equal to the last bit" if value == 0 else f"{distance}{limit}"
    return plotly_text(f"{run.label}, {run.place}: {told}")


def _beyond(run: Run, values: Sequence[float], top: float) -> list[tuple[int, float, str]]:
    """The steps, places and words of what lies beyond what the case itself is allowed, whatever others are; what is no
    finite number always does."""
    limits = [math.inf if (allowed := _allowed(run, step)) is None else allowed for step in range(len(values))]
    return [
        (step, _drawn(value, top), _words(run, step, value))
        for step, (value, limit) in enumerate(zip(values, limits, strict=True))
        if not math.isfinite(value) or value > limit
    ]


def _crosses(points: Sequence[tuple[int, float, str]]) -> Mapping[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "beyond what its case is allowed",
        "cliponaxis": False,  # whole on the top edge, too
        "x": [step for step, _, _ in points],
        "y": [value for _, value, _ in points],
        "marker": {"color": "@bad", "symbol": "x", "size": 9},
        "text": [words for _, _, words in points],
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
