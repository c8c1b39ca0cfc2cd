"""Memory: what fills a device, by category, predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboards.blocks import SYMBOLS, Block, bars, cell, column, missing, row, table, text
from dashboards.data import MIB, Run, Study, number
from harness.choosing.candidates import CATEGORIES

TITLE = "Memory"
_PEAK = "memory.peak_allocated_bytes.max_rank"
_FORESEEN_PEAK = "memory.predicted_peak_bytes"
_WORDS = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer states",
    "communication_buffer": "communication buffers",
    "activation": "activations",
    "other": "other",
}


def blocks(study: Study) -> list[Block]:
    groups = study.by_place(wanted=lambda run: _peak(run) is not None)
    if not groups:
        suite = (study.suites or ["sharding"])[0]
        return [missing("No case of this work had its memory measured.", f"meshmark run {suite}")]
    made: list[Block] = [
        text(
            "Bytes that torch's allocator handed out on the rank that needed most. Each category at its own largest, "
            "wherever in the step that is; a tick marks the peak of all of them together. The lower, lighter bar is "
            "what the strategy's closed form and a dry run foresee.",
            quiet=True,
        )
    ]
    for place, runs in groups:
        runs.sort(key=lambda run: _peak(run) or 0.0)
        made.append(bars(str(place), "MiB", [_WORDS[name] for name in CATEGORIES], [_row(run) for run in runs]))
    made.append(_table([run for _, runs in groups for run in runs]))
    return made


def _peak(run: Run) -> float | None:
    """As measured, else as foreseen."""
    measured = run.metric(_PEAK)
    return run.metric(_FORESEEN_PEAK) if measured is None else measured


def _row(run: Run) -> Mapping[str, Any]:
    stacks = [] if run.metric(_PEAK) is None else [_stack(run, "measured", "memory.", _PEAK)]
    if run.metric(_FORESEEN_PEAK) is not None or run.metric("memory.predicted_parameter_bytes"):
        stacks.append(_stack(run, "predicted", "memory.predicted_", _FORESEEN_PEAK))
    return {
        "label": run.label,
        "colour": f"@{run.strategy}",
        "mark": SYMBOLS.get(run.family, "circle"),
        "greyed": run.is_greyed,
        "stacks": stacks,
    }


def _stack(run: Run, name: str, prefix: str, peak: str) -> Mapping[str, Any]:
    values = [run.metric(f"{prefix}{category}_bytes") for category in CATEGORIES]
    peak_bytes = run.metric(peak)
    return {
        "name": name,
        "foreseen": name == "predicted",
        "values": [None if value is None else value / MIB for value in values],
        "peak": None if peak_bytes is None else peak_bytes / MIB,
    }


def _table(runs: list[Run]) -> Block:
    columns = [
        column("case", numeric=False),
        column("devices"),
        column("peak", unit="MiB"),
        column("predicted", unit="MiB"),
        column("off by", unit="%", help="predicted peak over measured peak"),
        *(column(_WORDS[name], unit="MiB", secondary=True) for name in CATEGORIES),
        column("resident", unit="MiB", help="what the operating system counts, all of the process", secondary=True),
    ]
    return table(columns, [_line(run) for run in runs], title="All figures")


def _line(run: Run) -> Mapping[str, Any]:
    peak, foreseen = run.metric(_PEAK), run.metric(_FORESEEN_PEAK)
    off = None if peak is None or foreseen is None or not peak else foreseen / peak - 1
    return row(
        cell(run.label, colour=f"@{run.strategy}", mark=SYMBOLS.get(run.family, "circle"), under=str(run.place)),
        cell(run.place.num_devices),
        cell(peak, number(peak, 1 / MIB)),
        cell(foreseen, number(foreseen, 1 / MIB)),
        cell(off, "-" if off is None else f"{100 * off:+.1f}"),
        *(
            cell(run.metric(f"memory.{name}_bytes"), number(run.metric(f"memory.{name}_bytes"), 1 / MIB))
            for name in CATEGORIES
        ),
        cell(run.metric("memory.peak_resident_bytes"), number(run.metric("memory.peak_resident_bytes"), 1 / MIB)),
        greyed=run.is_greyed,
    )
