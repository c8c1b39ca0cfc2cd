"""What is predicted of a case, beside what will be measured, and why what is not predicted is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness import textbook
from harness.implementation import Implementation
from harness.layout import Layout
from harness.measure.predicted_memory import predicted_with_reason, registry
from harness.workload import Workload

_NO_REASON = "its implementation does not say why"


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Figures by their metrics' names, and in words what follows "because" for each that is missing."""

    figures: Mapping[str, float]
    missing: Mapping[str, str]


def predictions(
    workload: Workload,
    implementation: type[Implementation],
    layout: Layout,
    options: Mapping[str, Any],
    device: torch.device,
    *,
    is_floor: bool = False,
    compared_as: str = "",
) -> Predictions:
    """Memory of the rank that needs most, bytes of the one that sends most, and those of the textbook of the strategy
    `compared_as`, by itself its own. A floor, and a rank alone, send nothing."""
    parameters = registry(workload)
    figures, reason_of_run = predicted_with_reason(workload, implementation, layout, options, device=device)
    reasons = implementation.unpredicted(workload, parameters, layout, options)
    missing: dict[str, str] = {}
    if "memory.predicted_parameter_bytes" not in figures:
        missing["states"] = reasons.get("states", _NO_REASON)
    if "memory.predicted_peak_bytes" not in figures:
        missing["peak"] = reasons.get("peak") or reason_of_run or _NO_REASON
    if not is_floor:
        wire_bytes = implementation.predicted_wire_bytes(workload, parameters, layout, options)
        if wire_bytes is not None:
            figures["communication.predicted_bytes_per_step"] = float(wire_bytes)
        elif layout.world_size > 1:
            missing["bytes"] = reasons.get("bytes", _NO_REASON)
        strategy = compared_as or implementation.strategy_of(options)
        if (by_the_book := textbook.bytes_per_step(strategy, workload, parameters, layout)) is not None:
            figures[textbook.METRIC] = float(by_the_book)
    return Predictions(figures=figures, missing=missing)
