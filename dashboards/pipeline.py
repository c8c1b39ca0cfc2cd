"""Pipeline: what each rank computed when, with the bubbles, beside the same schedule with stages that are alike and
messages that take no time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.blocks import SYMBOLS, Block, cell, column, figure, missing, more, plotly_text, row, table, text
from dashboards.data import Run, Study

TITLE = "Pipeline"
_MOST_FIGURES = 4  # before the others are folded away
_COLOURS = {"F": "@forward", "B": "@backward", "I": "@backward", "W": "@weights"}
_WORDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
_SHARES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # of a forward: theory's


@dataclass(frozen=True, kw_only=True)
class Box:
    """An action on a timeline; seconds from the step's begin."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    begin: float
    end: float

    @property
    def words(self) -> str:
        return f"{_WORDS.get(self.kind, self.kind)} of micro-batch {self.micro_batch}, stage {self.stage}"


def blocks(study: Study) -> list[Block]:
    runs = [run for run in study.runs if run.metric("pipeline.bubble_ratio") is not None]
    runs.sort(key=lambda run: (run.place.num_devices, run.metric("pipeline.bubble_ratio") or 0.0))
    if not runs:
        return [missing("No pipeline of this work was measured that tells of its actions.", "meshmark run scaling")]
    made: list[Block] = [
        text(
            "Each row is a rank; what is empty is its bubble. Above as measured in one step, below the same actions in "
            "the same order where stages are alike, a backward takes two forwards and messages no time.",
            quiet=True,
        ),
        _table(runs),
    ]
    drawn = [
        _figure(run, measured, theory(measured))
        for run in runs
        if run.result.case.role != "floor" and (measured := timeline(run))
    ]
    made += drawn[:_MOST_FIGURES]
    if rest := drawn[_MOST_FIGURES:]:
        made.append(more(f"{len(rest)} more timeline{'s' if len(rest) > 1 else ''}", *rest))
    return made


def timeline(run: Run) -> list[Box]:
    """The last recorded step, of every rank; empty where no actions were kept."""
    of_ranks = (run.result.samples.get("pipeline") or {}).get("actions") or ()
    boxes = []
    for rank, steps in enumerate(of_ranks):
        for recorded in steps[-1] if steps else ():
            action = re.fullmatch(r"(\d+)([A-Z])(\d+)", str(recorded["action"]))
            if action is None:
                return []
            boxes.append(
                Box(
                    rank=rank,
                    stage=int(action[1]),
                    kind=action[2],
                    micro_batch=int(action[3]),
                    begin=float(recorded["begin"]),
                    end=float(recorded["end"]),
                )
            )
    start = min((box.begin for box in boxes), default=0.0)
    return [_moved(box, box.begin - start, box.end - start) for box in boxes]


def theory(measured: Sequence[Box]) -> list[Box]:
    """The same actions, each rank's in its order, as soon as what they need is there. A forward takes such a time that
    all of it is as much work as was measured."""
    unit = sum(box.end - box.begin for box in measured) / (sum(_SHARES.get(box.kind, 1.0) for box in measured) or 1.0)
    waiting: dict[int, list[Box]] = {}
    for box in sorted(measured, key=lambda box: (box.rank, box.begin)):
        waiting.setdefault(box.rank, []).append(box)
    last_stage = max((box.stage for box in measured), default=0)
    done: dict[tuple[str, int, int], float] = {}
    free = dict.fromkeys(waiting, 0.0)
    made: list[Box] = []
    moved = True
    while moved:
        moved = False
        for rank, boxes in waiting.items():
            while boxes and (ready := _ready(boxes[0], done, last_stage)) is not None:
                box = boxes.pop(0)
                begin = max(free[rank], ready)
                free[rank] = begin + unit * _SHARES.get(box.kind, 1.0)
                done[(box.kind, box.stage, box.micro_batch)] = free[rank]
                made.append(_moved(box, begin, free[rank]))
                moved = True
    return made if len(made) == len(measured) else []


def bubble(boxes: Sequence[Box]) -> float:
    """The part of the whole in which a rank computes nothing, the mean over ranks."""
    whole = max(box.end for box in boxes) - min(box.begin for box in boxes)
    ranks = {box.rank for box in boxes}
    return 1.0 - sum(box.end - box.begin for box in boxes) / (whole * len(ranks))


def _ready(box: Box, done: Mapping[tuple[str, int, int], float], last_stage: int) -> float | None:
    """When the message comes that it waits for; None as long as that is not known."""
    if box.kind == "W" or (box.stage == 0 if box.kind == "F" else box.stage == last_stage):
        return 0.0
    if box.kind == "F":
        return done.get(("F", box.stage - 1, box.micro_batch))
    return next(
        (done[key] for kind in "BI" if (key := (kind, box.stage + 1, box.micro_batch)) in done),
        None,
    )


def _moved(box: Box, begin: float, end: float) -> Box:
    return Box(rank=box.rank, stage=box.stage, kind=box.kind, micro_batch=box.micro_batch, begin=begin, end=end)


def _figure(run: Run, measured: Sequence[Box], ideal: Sequence[Box]) -> Block:
    parts = [("measured", measured, "y2" if ideal else "y"), ("theory", ideal, "y")]
    traces = [
        _trace(kind, [box for box in boxes if box.kind == kind], axis, name)
        for name, boxes, axis in parts
        for kind in dict.fromkeys(box.kind for box in boxes)
    ]
    ranks = sorted({box.rank for box in measured})
    rows = {"tickvals": ranks, "ticktext": [f"rank {rank}" for rank in ranks], "autorange": "reversed"}
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "bargap": 0.12,
        "xaxis": {"title": "milliseconds", "rangemode": "tozero", "anchor": "y"},
        "yaxis": {**rows, "domain": [0.0, 0.45] if ideal else [0.0, 0.9]},
        "annotations": [],
    }
    if ideal:
        layout["yaxis2"] = {**rows, "domain": [0.55, 1.0], "anchor": "x"}
    for (name, boxes, _), top in zip(parts, (1.0, 0.45), strict=True):
        if boxes:
            layout["annotations"].append(
                {
                    "xref": "paper",
                    "yref": "paper",
                    "x": 1.0,
                    "y": top,
                    "xanchor": "right",
                    "yanchor": "bottom",
                    "showarrow": False,
                    "text": f"{name}: {100 * bubble(boxes):.0f} % bubble",
                }
            )
    height = 120 + 2 * 34 * len(ranks) if ideal else 120 + 34 * len(ranks)
    return figure(f"{run.label}, {run.place}", traces, layout, height=height + 40)


def _trace(kind: str, boxes: Sequence[Box], axis: str, name: str) -> Mapping[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": _WORDS.get(kind, kind),
        "base": [1e3 * box.begin for box in boxes],
        "x": [1e3 * (box.end - box.begin) for box in boxes],
        "y": [box.rank for box in boxes],
        "yaxis": axis,
        "text": [str(box.micro_batch) for box in boxes],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "marker": {"color": _COLOURS.get(kind, "@quiet")},
        "showlegend": name == "measured",
        "customdata": [plotly_text(box.words) for box in boxes],
        "hovertemplate": "%{customdata}<br>%{base:.3~g} ms, for %{x:.3~g} ms<extra></extra>",
    }


def _table(runs: Sequence[Run]) -> Block:
    columns = [
        column("case", numeric=False),
        column("devices"),
        column("bubble", unit="%", help="by the clock on the wall"),
        column(
            "replayed", unit="%", help="by the schedule's own clock: each rank has a processor, messages take no time"
        ),
        column("theory", unit="%", help="where stages are alike and a backward takes two forwards"),
        column("in flight", help="most micro-batches of which a stage held activations"),
        column("foreseen in flight", secondary=True),
    ]
    names = (
        "pipeline.bubble_ratio",
        "pipeline.replayed_bubble_ratio",
    )
    return table(
        columns,
        [
            row(
                cell(run.label, colour=f"@{run.strategy}", mark=SYMBOLS.get(run.family, "circle")),
                cell(run.place.num_devices),
                *(_share(run.metric(name), run.strategy) for name in names),
                _share(_in_theory(run), run.strategy),
                cell(run.metric("pipeline.in_flight_micro_batches"), _count(run, "in_flight_micro_batches")),
                cell(
                    run.metric("pipeline.predicted_in_flight_micro_batches"),
                    _count(run, "predicted_in_flight_micro_batches"),
                ),
                greyed=run.is_greyed,
            )
            for run in runs
        ],
    )


def _in_theory(run: Run) -> float | None:
    """The closed form's bubble, or that of the same actions in the same order."""
    if (ratio := run.metric("pipeline.predicted_bubble_ratio")) is not None:
        return ratio
    ideal = theory(timeline(run))
    return bubble(ideal) if ideal else None


def _share(ratio: float | None, strategy: str) -> Mapping[str, Any]:
    return (
        cell(None) if ratio is None else cell(ratio, f"{100 * ratio:.0f}", bar=min(1.0, ratio), colour=f"@{strategy}")
    )


def _count(run: Run, name: str) -> str:
    value = run.metric(f"pipeline.{name}")
    return "-" if value is None else f"{value:.0f}"
