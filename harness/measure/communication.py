"""What a step's communication was: events, unions of intervals, and their metrics.

[Note: Three views of waiting] *In flight* is from launch to completion: the network or its threads were busy, whether
anyone waited or not. *Blocked* is the time a caller spent inside a call or inside Work.wait; DDP's reducer waits in C++
on a future, out of sight, so its blocked time is a lower bound. *Exposed* is what a step would save if communication
cost nothing: the median step minus the median step over the null twin, copies and packing included.

[Note: Latencies] How many latencies of the link a step waits for one after another: what it gets longer by when every
operation is launched d later, over d. Operations in flight together count once, what computation hides not at all:

    compute      | f1 |~~~~| f2 |~~~~|      2: each is waited for before anything else is done
    in flight         |----|    |----|

    compute      | b2 | b1 |~~~~|           1: the first is hidden by b1, and only the second is waited for
    in flight         |----|
    in flight              |----|

An operation counts as one, however often the backend goes around its ring for it; a ring made of sends and receives
counts for what it is. d is large against the noise of a step, and the same part of the computing whatever the strategy:
the figure says how a step fares on a link of such latency, on which less is hidden than on a quick one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

Interval = tuple[float, float]  # begin, end; seconds

_DELAY_OF_NULL_STEP = 0.25
_MIN_DELAY_SECONDS = 0.02
_MAX_SECONDS_OF_DELAYS = 3.0  # in one step


class NothingRecorded(Exception):
    """A rank of a group of several saw no collective: the instrument is blind, which must not read as zero."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One operation on one rank; times are seconds on `time.perf_counter`. `ranks` are the group's global ranks, for
    send and recv the source and the destination (of a recv from anyone: the group). `dtype` is empty for a
    barrier. See [Note: Sizes] in harness/wire_bytes.py."""

    operation: str
    ranks: tuple[int, ...]
    dtype: str
    payload_bytes: int
    wire_bytes: int
    transport: str
    launched: float
    returned: float
    completed: float
    blocked: tuple[Interval, ...]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one rank saw of one step."""

    start: float
    end: float
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def busy_seconds(self) -> float:
        """How long at least one operation was in flight."""
        return union_seconds(self._clip((event.launched, event.completed) for event in self.events))

    def blocked_seconds(self) -> float:
        """How long at least one caller was blocked."""
        return union_seconds(self._clip(interval for event in self.events for interval in event.blocked))

    def _clip(self, intervals: Iterable[Interval]) -> list[Interval]:
        return [(max(begin, self.start), min(end, self.end)) for begin, end in intervals]

    def to_json(self) -> dict[str, Any]:
        return {"start": self.start, "end": self.end, "events": [asdict(event) for event in self.events]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepRecord:
        events = [
            Event(
                **{
                    **event,
                    "ranks": tuple(event["ranks"]),
                    "blocked": tuple((begin, end) for begin, end in event["blocked"]),
                }
            )
            for event in data["events"]
        ]
        return cls(start=data["start"], end=data["end"], events=tuple(events))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time as disjoint, sorted intervals; empty ones vanish."""
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def union_seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in union(intervals))


def overlap_seconds(compute: Sequence[Interval], communication: Sequence[Interval]) -> float:
    """How long both went on at once: compute + communication - active, each a union."""
    return union_seconds(compute) + union_seconds(communication) - union_seconds([*compute, *communication])


def exposed_seconds(compute: Sequence[Interval], communication: Sequence[Interval]) -> float:
    """How long communication went on alone: active - compute, each a union."""
    return union_seconds([*compute, *communication]) - union_seconds(compute)


def summarise(steps: Sequence[Sequence[StepRecord]]) -> dict[str, float]:
    """The metrics of instrumented steps, `steps[rank][step]`: means over a rank's steps (medians for the two ratios),
    of the largest rank. `bytes` are wire bytes. NothingRecorded if there are several ranks and one saw no operation."""
    if not steps or any(not rank_steps for rank_steps in steps):
        raise ValueError(f"communication: expected at least one step of each rank, got {[len(each) for each in steps]}")
    blind = [rank for rank, rank_steps in enumerate(steps) if not any(step.events for step in rank_steps)]
    if len(steps) > 1 and blind:
        raise NothingRecorded(
            f"communication: expected collectives on each of {len(steps)} ranks, none recorded on rank "
            f"{', '.join(map(str, blind))}"
        )
    metrics: defaultdict[str, float] = defaultdict(float)
    for rank_steps in steps:
        for name, value in _summarise_rank(rank_steps).items():
            metrics[name] = max(metrics[name], value)
    return dict(metrics)


def _summarise_rank(steps: Sequence[StepRecord]) -> dict[str, float]:
    totals: defaultdict[str, int] = defaultdict(int)
    for event in (event for step in steps for event in step.events):
        for scope in ("_per_step", f".{event.operation}"):
            totals[f"communication.calls{scope}"] += 1
            totals[f"communication.payload_bytes{scope}"] += event.payload_bytes
            totals[f"communication.bytes{scope}"] += event.wire_bytes
    always = {f"communication.{what}_per_step": 0.0 for what in ("calls", "payload_bytes", "bytes")}
    return {
        **always,
        **{name: total / len(steps) for name, total in totals.items()},
        "communication.busy_ratio": median(step.busy_seconds() / step.seconds for step in steps),
        "communication.blocked_ratio": median(step.blocked_seconds() / step.seconds for step in steps),
    }


def exposed(real_step_seconds: Sequence[float], null_step_seconds: Sequence[float]) -> dict[str, float]:
    """Exposed communication from steps over the real backend and over its null twin, [Note: Three views of waiting]."""
    if not real_step_seconds or not null_step_seconds:
        raise ValueError(
            "exposed communication: expected samples of real and of null steps, got "
            f"{len(real_step_seconds)} and {len(null_step_seconds)}"
        )
    real, null = median(real_step_seconds), median(null_step_seconds)
    seconds = max(0.0, real - null)
    return {"communication.exposed_seconds": seconds, "communication.exposed_ratio": seconds / real}


def delay_for(null_step_seconds: Sequence[float], calls_per_step: float) -> float:
    """The d of [Note: Latencies]: a quarter of the null step, which is computing and little else; at least 20 ms; but a
    step in which every operation waits for the one before must end within seconds."""
    wanted = max(_MIN_DELAY_SECONDS, _DELAY_OF_NULL_STEP * median(null_step_seconds))
    return min(wanted, _MAX_SECONDS_OF_DELAYS / max(1.0, calls_per_step))


def exposed_latencies(
    real_step_seconds: Sequence[float], delayed_step_seconds: Sequence[float], delay_seconds: float
) -> dict[str, float]:
    """[Note: Latencies] from real steps and from steps in which every operation was launched `delay_seconds` late."""
    if not real_step_seconds or not delayed_step_seconds or delay_seconds <= 0:
        raise ValueError(
            "exposed latencies: expected samples of real and of delayed steps and a delay above 0 s, got "
            f"{len(real_step_seconds)}, {len(delayed_step_seconds)} and {delay_seconds} s"
        )
    latencies = max(0.0, median(delayed_step_seconds) - median(real_step_seconds)) / delay_seconds
    return {
        "communication.exposed_latencies_per_step": latencies,
        "communication.delay_seconds": delay_seconds,
    }
