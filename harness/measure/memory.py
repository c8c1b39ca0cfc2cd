"""Memory of one rank, exact to the byte: by category, by phase and at its peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from itertools import pairwise
from types import TracebackType
from typing import Self, get_args

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from harness.implementation import Phase
from harness.measure.allocations import Curve, Mark, Timeline, read_profile
from harness.measure.attribution import (
    LIST_MARK,
    MARK_PREFIX,
    STEP_MARK,
    Category,
    Span,
    by_category,
    phase_marks,
    storages,
)
from harness.measure.profiled_threads import with_new_threads
from harness.measure.resident import peak_resident_bytes, reset_peak_resident_bytes
from harness.parameters import MemoryCategory

METRIC_NAMES: Mapping[Category, str] = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer_states": "optimizer_bytes",
    "communication_buffers": "communication_buffer_bytes",
    "activations": "activation_bytes",
    "other": "other_bytes",
}
NUM_WARM_UP_STEPS = 2
"""Optimizers make their states in the first step; torch's reducer makes its final buckets in the second, while the
first ones are still alive."""
MAX_TIMELINE_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """One rank's memory over its measured steps, in bytes; plain values (`asdict` and `MemoryReport(**data)` invert
    each other).

    `largest_bytes` holds the most that each category ever had at once, `at_peak_bytes` what each had at the moment of
    the peak: they sum to it. Without a forward mark activations cannot be told from the rest, nor communication
    buffers that are neither listed nor marked as lent: these are absent from both.
    `phase_peak_bytes` is the peak while a phase's mark was open, for the phases that were marked; a mark inside another
    counts for both. `mapped_bytes` are those that the implementation lists and the allocator did not hand out; they are
    part of every other figure. `peak_reserved_bytes` is what the caching allocator holds, on a GPU. `timeline` gives
    (seconds since the first measured step, most bytes alive around then).
    """

    peak_allocated_bytes: int
    first_step_peak_allocated_bytes: int
    warm_up_peak_allocated_bytes: int
    steady_allocated_bytes: int
    mapped_bytes: int
    peak_resident_bytes: int
    peak_reserved_bytes: int | None
    largest_bytes: Mapping[Category, int]
    at_peak_bytes: Mapping[Category, int]
    phase_peak_bytes: Mapping[Phase, int]
    timeline: Sequence[tuple[float, int]] = field(repr=False)

    def metrics(self) -> dict[str, int]:
        """Flat figures of this rank, by name; what was not seen is absent."""
        figures = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), int)}
        figures |= {METRIC_NAMES[category]: value for category, value in self.largest_bytes.items()}
        figures |= {f"peak_{phase}_bytes": value for phase, value in self.phase_peak_bytes.items()}
        return figures | {f"at_peak.{METRIC_NAMES[category]}": value for category, value in self.at_peak_bytes.items()}


def combine(per_rank: Sequence[MemoryReport]) -> dict[str, float]:
    """The case's metrics: each figure of the rank that has most of it; what was alive at the peak is that of the rank
    with the highest peak, so that it still sums to it."""
    if not per_rank:
        raise ValueError("memory: expected the report of at least one rank, got none")
    figures: dict[str, float] = {}
    highest = max(per_rank, key=lambda report: report.peak_allocated_bytes)
    for report in per_rank:
        for name, value in report.metrics().items():
            if not name.startswith("at_peak.") or report is highest:
                figures[f"memory.{name}"] = max(value, figures.get(f"memory.{name}", 0))
    figures["memory.peak_allocated_bytes.max_rank"] = figures.pop("memory.peak_allocated_bytes")
    return figures


class MemoryRecorder:
    """Records what one rank allocates on `device`, from before the build to after the last step:

        with MemoryRecorder(device) as recorder:
            implementation = build()
            for batch in batches:
                with recorder.step(implementation.memory_tensors):
                    implementation.train_step(batch)
        report = recorder.report()

    The steps after the first NUM_WARM_UP_STEPS are measured. Batches made before the recorder starts do not count, nor
    do a dataset's caches. Not for timed runs, and not beside another profiler.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profiler: profile | None = None
        self._profiling: AbstractContextManager[None] | None = None
        self._timeline: Timeline | None = None
        self._bytes_before = 0
        self._listed: list[dict[MemoryCategory, list[Span]]] = []  # one for each step
        self._device_peaks: list[int] = []  # the caching allocator's own, one for each step
        self._reserved_peak: int | None = None
        self._resident_peak = 0

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            self._bytes_before = torch.cuda.memory_allocated(self._device)
        # Allocators report on the CPU side, those of a GPU too.
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiling = with_new_threads(self._profiler)
        self._profiling.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._profiler is not None and self._profiling is not None
        self._profiling.__exit__(kind, error, traceback)
        if error is None:
            self._timeline = read_profile(self._profiler, self._device, MARK_PREFIX)
        self._profiler = None

    @contextmanager
    def step(self, memory_tensors: Callable[[], Mapping[MemoryCategory, Iterable[Tensor]]]) -> Iterator[None]:
        """Encloses one optimizer step; asks `memory_tensors` at its end, while what it lists is alive."""
        if self._profiler is None:
            raise ValueError("memory: step() belongs inside `with recorder:`")
        if len(self._listed) == NUM_WARM_UP_STEPS:
            reset_peak_resident_bytes()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        with record_function(STEP_MARK):
            yield
        if self._device.type == "cuda":
            self._device_peaks.append(torch.cuda.max_memory_allocated(self._device))
            self._reserved_peak = max(self._reserved_peak or 0, torch.cuda.max_memory_reserved(self._device))
        self._resident_peak = peak_resident_bytes()
        with record_function(LIST_MARK), torch.no_grad():
            self._listed.append(
                {category: list(storages(tensors, self._device)) for category, tensors in memory_tensors().items()}
            )

    def report(self) -> MemoryReport:
        """What the recorded steps used. ValueError if there are too few of them."""
        if self._timeline is None:
            raise ValueError("memory: report() belongs after `with recorder:`")
        steps = self._timeline.marked(STEP_MARK)
        if len(steps) <= NUM_WARM_UP_STEPS:
            raise ValueError(
                f"memory: expected at least {NUM_WARM_UP_STEPS + 1} steps, the first {NUM_WARM_UP_STEPS} of them for "
                f"warm-up, got {len(steps)}"
            )
        assert len(steps) == len(self._listed), f"{len(steps)} step marks, {len(self._listed)} steps"
        measured = Mark("measured", steps[NUM_WARM_UP_STEPS].begin, steps[-1].end)

        blocks, mapped = by_category(self._timeline, self._listed)
        fixed = {category: mapped.get(category, 0) for category in blocks}
        # What was allocated before the recorder came: listed tensors among it have their category already.
        fixed["other"] += max(0, self._bytes_before - sum(mapped.values()))
        curves = {category: Curve(blocks[category]) for category in blocks}
        total, beneath = Curve(self._timeline.blocks), sum(fixed.values())

        peaks_of_steps = [total.peak(step.begin, step.end) for step in steps]
        _, peak_at = max(peaks_of_steps[NUM_WARM_UP_STEPS:], key=lambda peak: peak[0])
        step_peaks = [alive + beneath for alive, _ in peaks_of_steps]
        if self._device_peaks:
            outside = beneath - self._bytes_before  # listed, but never handed out by the caching allocator
            step_peaks = [step_peak + outside for step_peak in self._device_peaks]
        peak = max(step_peaks[NUM_WARM_UP_STEPS:])
        at_peak = {category: curve.at(peak_at) + fixed[category] for category, curve in curves.items()}
        at_peak["other"] += peak - sum(at_peak.values())
        return MemoryReport(
            peak_allocated_bytes=peak,
            first_step_peak_allocated_bytes=step_peaks[0],
            warm_up_peak_allocated_bytes=max(step_peaks[:NUM_WARM_UP_STEPS]),
            steady_allocated_bytes=total.at(measured.end) + beneath,
            mapped_bytes=sum(mapped.values()),
            peak_resident_bytes=self._resident_peak,
            peak_reserved_bytes=self._reserved_peak,
            largest_bytes={
                category: curve.peak(measured.begin, measured.end)[0] + fixed[category]
                for category, curve in curves.items()
            },
            at_peak_bytes=at_peak,
            phase_peak_bytes={
                phase: max(peaks) + beneath
                for phase in get_args(Phase)
                if (peaks := [total.peak(m.begin, m.end)[0] for m in phase_marks(self._timeline, phase, measured)])
            },
            timeline=_sample(total, measured, beneath),
        )


def _sample(curve: Curve, within: Mark, beneath: int) -> tuple[tuple[float, int], ...]:
    """The largest values of `curve` in equal slots of the interval: the peak stays visible."""
    num_slots = MAX_TIMELINE_POINTS
    bounds = [within.begin + (within.end - within.begin) * slot // num_slots for slot in range(num_slots + 1)]
    return tuple(((begin - within.begin) / 1e9, curve.peak(begin, end)[0] + beneath) for begin, end in pairwise(bounds))
