"""Scaling: throughput and efficiency over the number of devices: the same work, and as much work for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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
from dashboards.data import Run, Study, is_alone, number
from harness.choosing.work import batch_of

TITLE = "Scaling"
Kind = Literal["strong", "weak"]
_WHAT = {
    "strong": ("Strong scaling", "The same global batch over more devices."),
    "weak": ("Weak scaling", "The global batch grows with the devices: each has the same share."),
}
_COMMAND = "meshmark run scaling"
Line = Sequence[tuple[int, Run]]


def blocks(study: Study, of_model: Sequence[Study]) -> list[Block]:
    """`of_model`: the studies of the same model with any batch, this one among them."""
    runs = [run for one in of_model for run in one.runs if run.place.num_nodes == 1 and run.is_a_measure]
    runs = [run for run in runs if _speed(run) is not None]
    made: list[Block] = []
    if study.cores is not None:
        made.append(
            text(
                f"Measured on {study.cores} cores: more than {study.cores} ranks share them, which no strategy "
                "can make good. The grey line is what perfect scaling of one process would give on these cores.",
                quiet=True,
            )
        )
    if any(run.settings for run in runs):
        made.append(
            text(
                "In a line the fastest way through the batch counts: its micro-batches and checkpoints are told in the "
                "table, and by each point.",
                quiet=True,
            )
        )
    others = dict.fromkeys(run.label for one in of_model for run in one.runs if run.result.other_work)
    if others:
        made.append(text(f"Left out, as their options depart from the recipe: {', '.join(others)}.", quiet=True))
    kinds: tuple[tuple[Kind, Callable[[Run], object]], ...] = (
        ("strong", lambda run: batch_of(run.result.case.workload)),
        ("weak", lambda run: (batch_of(run.result.case.workload) or 0) / run.place.num_devices),
    )
    for kind, alike in kinds:
        made += _kind(
            kind, [run for run in runs if kind == "strong" or batch_of(run.result.case.workload)], alike, study
        )
    return made


def _kind(kind: Kind, runs: Sequence[Run], alike: Callable[[Run], object], study: Study) -> list[Block]:
    title, note = _WHAT[kind]
    wanted = _wanted(kind, runs, alike, study)
    base = next((run for run in runs if is_alone(run) and not run.settings and alike(run) == wanted), None)
    lines: dict[tuple[str, str], dict[int, Run]] = {}
    for run in runs:
        if not is_alone(run) and alike(run) == wanted:
            points = lines.setdefault((run.label_without_settings, run.strategy), {})
            held = points.get(run.place.num_devices)
            if held is None or (_speed(run) or 0.0) > (_speed(held) or 0.0):
                points[run.place.num_devices] = run
    series = {key: sorted(points.items()) for key, points in lines.items() if len(points) > 1}
    if not series:
        return [heading(title, note), missing("Fewer than two numbers of devices were measured.", _COMMAND)]
    made: list[Block] = [heading(title, _measured(note, base))]
    throughput = [_trace(points, key, _speed) for key, points in series.items()]
    counts = sorted({count for points in series.values() for count, _ in points} | ({1} if base else set()))
    axis = {"tickvals": counts, "title": "devices", "range": [min(counts) - 0.25, max(counts) * 1.02 + 0.25]}
    unit = runs[0].unit
    if base is not None:
        throughput.append(_ideal(base, counts, study.cores))
    made.append(
        figure(
            f"Throughput, {unit} a second",
            throughput,
            {"xaxis": axis, "yaxis": {"rangemode": "tozero", "title": f"{unit}/s", "tickformat": "~s"}},
        )
    )
    if base is not None:
        made.append(
            figure(
                "Efficiency",
                [_trace(points, key, _efficiency_of(base)) for key, points in series.items()],
                {
                    "xaxis": axis,
                    "yaxis": {"rangemode": "tozero", "title": "of one process, a device", "ticksuffix": " %"},
                },
                note="Throughput of a device over that of one process that does the work alone.",
            )
        )
    made.append(_table(series, base, unit))
    return made


def _wanted(kind: Kind, runs: Sequence[Run], alike: Callable[[Run], object], study: Study) -> object:
    """What the runs of one scaling have alike: this study's batch, or the share of it that most devices have had."""
    if kind == "strong":
        return batch_of(study.work)
    counts: dict[object, set[int]] = {}
    for run in runs:
        if not is_alone(run):
            counts.setdefault(alike(run), set()).add(run.place.num_devices)
    return max(counts, key=lambda share: len(counts[share]), default=None)


def _measured(note: str, base: Run | None) -> str:
    if base is None:
        return f"{note} No single process was measured with it, so there is no efficiency."
    batch = batch_of(base.result.case.workload)
    return f"{note} One process: {number(_speed(base))} {base.unit}/s with a batch of {batch}."


def _speed(run: Run) -> float | None:
    return run.metric(f"throughput.{run.unit}_per_second")


def _efficiency_of(base: Run) -> Callable[[Run], float | None]:
    alone = _speed(base)

    def efficiency(run: Run) -> float | None:
        speed = _speed(run)
        return None if speed is None or not alone else 100 * speed / run.place.num_devices / alone

    return efficiency


def _trace(points: Line, key: tuple[str, str], value: Callable[[Run], float | None]) -> Mapping[str, Any]:
    label, strategy = key
    family = points[0][1].family
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label,
        "x": [count for count, _ in points],
        "y": [value(run) for _, run in points],
        "line": {"color": f"@{strategy}", "dash": DASHES.get(family, "solid"), "width": 2},
        "marker": {"color": f"@{strategy}", "symbol": SYMBOLS.get(family, "circle"), "size": 8},
        "label_last": label,
        "text": [plotly_text(run.label) for _, run in points],
        "hovertemplate": "%{text}<br>%{x} devices: %{y:.4~g}<extra></extra>",
    }


def _ideal(base: Run, counts: Sequence[int], cores: int | None) -> Mapping[str, Any]:
    alone = _speed(base) or 0.0
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "perfect scaling",
        "x": list(counts),
        "y": [alone * min(count, cores or count) for count in counts],
        "line": {"color": "@quiet", "width": 1, "dash": "dot"},
        "label_last": "perfect",
        "hovertemplate": "perfect scaling of one process<extra></extra>",
    }


def _table(series: Mapping[tuple[str, str], Line], base: Run | None, unit: str) -> Block:
    efficiency = _efficiency_of(base) if base is not None else None
    rows = []
    for (label, strategy), points in series.items():
        for count, run in points:
            share = None if efficiency is None else efficiency(run)
            rows.append(
                row(
                    cell(label, colour=f"@{strategy}", mark=SYMBOLS.get(run.family, "circle"), under=run.settings),
                    cell(count),
                    cell(batch_of(run.result.case.workload)),
                    cell(_speed(run), number(_speed(run))),
                    cell(
                        share,
                        "-" if share is None else f"{share:.0f}",
                        bar=None if share is None else min(1.0, share / 100),
                        colour=f"@{strategy}",
                    ),
                )
            )
    columns = [
        column("case", numeric=False),
        column("devices"),
        column("batch"),
        column(f"{unit}/s"),
        column("efficiency", unit="%"),
    ]
    return table(columns, rows)
