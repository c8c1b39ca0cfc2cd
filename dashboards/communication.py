"""Communication: what a step sends, how long something is on its way, and how long anyone waits for it."""

from __future__ import annotations

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
from dashboards.data import MIB, Run, Study, number
from harness.choosing.candidates import Place

TITLE = "Communication"
_SENT = "communication.bytes_per_step"
_NODE = "communication.node_wire_bytes_per_step"
_EXPOSED = "communication.exposed_ratio"
_BUSY = "communication.busy_ratio"


def blocks(study: Study) -> list[Block]:
    groups = study.by_place(wanted=lambda run: run.metric(_SENT) is not None)
    if not groups:
        suite = (study.suites or ["sharding"])[0]
        return [missing("No case of this work had its communication measured.", f"meshmark run {suite}")]
    made: list[Block] = [
        text(
            "Sent is what one rank puts on the wire in a step, exactly; the tick is the closed form. Busy is the part "
            "of a step in which something was on its way, exposed the part that would be saved if communication cost "
            "nothing.",
            quiet=True,
        )
    ]
    if len(groups) > 1 and any(_is_compared(run) for _, runs in groups for run in runs):
        made.append(_by_place(groups))
    for place, runs in groups:
        made.append(heading(str(place)))
        made.append(_table(runs))
    return made


def _by_place(groups: Sequence[tuple[Place, list[Run]]]) -> Block:
    """The exposed part by devices and link: of each strategy and library the setting that waits least."""
    names = [plotly_text(_short(place)) for place, _ in groups]
    series: dict[tuple[str, str], dict[str, Run]] = {}
    for name, (_, runs) in zip(names, groups, strict=True):
        for run in runs:
            if not _is_compared(run):
                continue
            best = series.setdefault((run.family, run.strategy), {})
            held = best.get(name)
            if held is None or (run.metric(_EXPOSED) or 0.0) < (held.metric(_EXPOSED) or 0.0):
                best[name] = run
    traces = [_trace(names, *key, of_place) for key, of_place in series.items()]
    return figure(
        "Exposed communication by devices and link",
        traces,
        {
            "xaxis": {"type": "category", "categoryarray": names, "title": ""},
            "yaxis": {"ticksuffix": " %", "rangemode": "tozero", "title": "of a step"},
        },
        note="Of each strategy and library the setting that waits least, of those that train what the recipe says.",
    )


def _is_compared(run: Run) -> bool:
    """Whoever leaves out an exchange, and so trains another model or does other work, waits less than any."""
    return run.is_a_measure and run.metric(_EXPOSED) is not None


def _trace(names: Sequence[str], family: str, strategy: str, runs: Mapping[str, Run]) -> Mapping[str, Any]:
    present = [name for name in names if name in runs]
    values = [100 * (runs[name].metric(_EXPOSED) or 0.0) for name in present]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{family} {strategy.replace('_', ' ')}",
        "x": present,
        "y": values,
        "line": {"color": f"@{strategy}", "dash": DASHES.get(family, "solid"), "width": 2},
        "marker": {"color": f"@{strategy}", "symbol": SYMBOLS.get(family, "circle"), "size": 8},
        "text": [plotly_text(runs[name].label) for name in present],
        "hovertemplate": "%{text}<br>%{x}: %{y:.0f} % of a step exposed<extra></extra>",
    }


def _short(place: Place) -> str:
    if place.num_nodes == 1:
        return place.devices
    return f"{place.num_nodes} x {place.num_devices // place.num_nodes} {place.link}"


def _table(runs: list[Run]) -> Block:
    runs = sorted(runs, key=lambda run: run.metric(_EXPOSED) or 0.0)
    most = max(max(run.metric(_SENT) or 0.0, run.metric(f"{_PREDICTED}") or 0.0) for run in runs) or 1.0
    has_nodes = any(run.metric(_NODE) is not None for run in runs)
    columns = [
        column("case", numeric=False),
        column("sent", unit="MiB a step"),
        *([column("a node's link", unit="MiB a step", help="both ways of the busiest node")] if has_nodes else []),
        column("busy", unit="%"),
        column("exposed", unit="%"),
        column("operations", unit="a step", secondary=True),
        column("latencies", unit="a step", help="link latencies waited for one after another", secondary=True),
    ]
    return table(columns, [_line(run, most, has_nodes=has_nodes) for run in runs])


_PREDICTED = "communication.predicted_bytes_per_step"


def _line(run: Run, most: float, *, has_nodes: bool) -> Mapping[str, Any]:
    sent, foreseen = run.metric(_SENT), run.metric(_PREDICTED)
    calls, latencies = (
        run.metric("communication.calls_per_step"),
        run.metric("communication.exposed_latencies_per_step"),
    )
    colour = f"@{run.strategy}"
    return row(
        cell(run.label, colour=colour, mark=SYMBOLS.get(run.family, "circle")),
        cell(
            sent,
            number(sent, 1 / MIB),
            bar=None if sent is None else sent / most,
            tick=None if foreseen is None else foreseen / most,
            colour=colour,
            tip="" if foreseen is None else f"predicted {number(foreseen, 1 / MIB)} MiB",
        ),
        *([cell(run.metric(_NODE), number(run.metric(_NODE), 1 / MIB))] if has_nodes else []),
        _share(run.metric(_BUSY), colour),
        _share(run.metric(_EXPOSED), colour),
        cell(calls, "-" if calls is None else f"{calls:,.0f}" if calls == int(calls) else number(calls)),
        cell(latencies, number(latencies)),
        greyed=run.is_greyed,
    )


def _share(ratio: float | None, colour: str) -> Mapping[str, Any]:
    if ratio is None:
        return cell(None)
    return cell(ratio, f"{100 * ratio:.0f}", bar=max(0.0, min(1.0, ratio)), colour=colour)
