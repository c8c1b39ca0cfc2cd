"""Exact figures: bytes, calls, memory and fp64 losses against their accepted values; no statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.regression.verdicts import Finding


@dataclass(frozen=True, kw_only=True)
class ExactFigure:
    """`tolerance` is relative. Of a figure with `less_is_better` a smaller value is an improvement; of any other, every
    departure is a regression. `precision`: the only one it is exact in."""

    name: str
    words: str
    tolerance: float = 0.0
    less_is_better: bool = True
    precision: str | None = None


EXACT_FIGURES = (
    ExactFigure(name="communication.bytes_per_step", words="bytes a step"),
    ExactFigure(name="communication.calls_per_step", words="calls a step"),
    # An all-reduce that ends earlier or later finds another moment of a backward.
    ExactFigure(name="memory.peak_allocated_bytes.max_rank", words="bytes at the allocated peak", tolerance=0.01),
    # One order of sums against another's, on another processor.
    ExactFigure(name="loss", words="fp64 loss", tolerance=1e-12, less_is_better=False, precision="fp64"),
)


def exact_values(metrics: Mapping[str, float], precision: str) -> dict[str, float]:
    """Those of the exact figures that a run has."""
    return {
        figure.name: metrics[figure.name]
        for figure in EXACT_FIGURES
        if figure.name in metrics and figure.precision in (None, precision)
    }


def exact_findings(values: Mapping[str, float], accepted: Mapping[str, float]) -> list[Finding]:
    """One finding for each figure that has an accepted value. One that is missing now is suspect: nobody has seen that
    it is as it should be."""
    return [
        _finding(figure, values.get(figure.name), accepted[figure.name])
        for figure in EXACT_FIGURES
        if figure.name in accepted
    ]


def _finding(figure: ExactFigure, value: float | None, accepted: float) -> Finding:
    if value is None:
        text = f"{figure.words}: not measured, accepted is {_number(accepted)}"
        return Finding(figure=figure.name, verdict="suspect", text=text)
    shift = (value - accepted) / abs(accepted) if accepted else float(value != 0)
    if abs(value - accepted) <= figure.tolerance * abs(accepted):
        return Finding(figure=figure.name, verdict="ok", text=f"{figure.words}: as accepted", shift=shift)
    allowed = f", allowed {figure.tolerance:.0e}" if figure.tolerance else ""
    text = f"{figure.words}: {_number(value)}, accepted is {_number(accepted)} ({shift:+.2%}{allowed})"
    better = figure.less_is_better and value < accepted
    return Finding(figure=figure.name, verdict="improved" if better else "regressed", text=text, shift=shift)


def _number(value: float) -> str:
    return f"{int(value):,}" if value.is_integer() else f"{value!r}"
