"""Exact figures: bytes, calls, memory and fp64 losses against their accepted values; no statistics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from harness.regression.verdicts import Finding


@dataclass(frozen=True, kw_only=True)
class ExactFigure:
    """`tolerance` is relative. Of a figure with `less_is_better` a smaller value is an improvement; of any other, every
    departure is a regression. `precision`: the only one it is exact in. One `of_last_parity_step` is another figure for
    another number of steps, and bears that in its name."""

    name: str
    words: str
    tolerance: float = 0.0
    less_is_better: bool = True
    precision: str | None = None
    of_last_parity_step: bool = False

    def name_after(self, parity_steps: int) -> str:
        """As accepted values have it."""
        return f"{self.name}.after_{parity_steps}_steps" if self.of_last_parity_step else self.name


EXACT_FIGURES = (
    ExactFigure(name="communication.bytes_per_step", words="bytes a step"),
    ExactFigure(name="communication.calls_per_step", words="calls a step"),
    # An all-reduce that ends earlier or later finds another moment of a backward.
    ExactFigure(name="memory.peak_allocated_bytes.max_rank", words="bytes at the allocated peak", tolerance=0.01),
    # One order of sums against another's, on another processor.
    ExactFigure(
        name="loss",
        words="fp64 loss",
        tolerance=1e-12,
        less_is_better=False,
        precision="fp64",
        of_last_parity_step=True,
    ),
)


def exact_values(metrics: Mapping[str, float], precision: str, parity_steps: int) -> dict[str, float]:
    """Those of the exact figures that a run has."""
    return {
        figure.name_after(parity_steps): metrics[figure.name]
        for figure in EXACT_FIGURES
        if figure.name in metrics and figure.precision in (None, precision)
    }


def exact_findings(values: Mapping[str, float], accepted: Mapping[str, float], parity_steps: int) -> list[Finding]:
    """One finding for each accepted value. One that nothing can be held against now is suspect: nobody has seen that it
    is as it should be."""
    findings: list[Finding] = []
    told: set[str] = set()
    for figure in EXACT_FIGURES:
        name = figure.name_after(parity_steps)
        others = after_other_steps(name, accepted)
        told |= {name, *others}
        if name in accepted:
            findings.append(_finding(name, figure, values.get(name), accepted[name]))
        else:
            findings += [
                _of_other_steps(other, figure, accepted[other], values.get(name), parity_steps) for other in others
            ]
    unknown = [name for name in accepted if name not in told]
    return findings + [_suspect(name, f"{name}: accepted, but no exact figure has that name") for name in unknown]


def after_other_steps(name: str, accepted: Collection[str]) -> list[str]:
    """The accepted figures that are this one after another number of steps, or of nobody knows how many."""
    figure = name.partition(".after_")[0]
    if figure == name:
        return []
    return [other for other in accepted if other != name and other.partition(".after_")[0] == figure]


def _finding(name: str, figure: ExactFigure, value: float | None, accepted: float) -> Finding:
    if value is None:
        return _suspect(name, f"{figure.words}: not measured, accepted is {_number(accepted)}")
    shift = (value - accepted) / abs(accepted) if accepted else float(value != 0)
    if abs(value - accepted) <= figure.tolerance * abs(accepted):
        return Finding(figure=name, verdict="ok", text=f"{figure.words}: as accepted", shift=shift)
    allowed = f", allowed {figure.tolerance:.0e}" if figure.tolerance else ""
    text = f"{figure.words}: {_number(value)}, accepted is {_number(accepted)} ({shift:+.2%}{allowed})"
    better = figure.less_is_better and value < accepted
    return Finding(figure=name, verdict="improved" if better else "regressed", text=text, shift=shift)


def _of_other_steps(name: str, figure: ExactFigure, accepted: float, value: float | None, parity_steps: int) -> Finding:
    """`value` is that after `parity_steps`, which is another figure than the accepted one, `name`."""
    after = name.partition(".after_")[2].replace("_", " ") or "an unknown number of steps"
    if value is None:
        return _suspect(name, f"{figure.words}: not measured, accepted after {after} is {_number(accepted)}")
    text = f"{figure.words}: accepted after {after}, measured after {parity_steps}: `meshmark accept`"
    return _suspect(name, text)


def _suspect(name: str, text: str) -> Finding:
    return Finding(figure=name, verdict="suspect", text=text, is_absence=True)


def _number(value: float) -> str:
    return f"{int(value):,}" if value.is_integer() else f"{value!r}"
