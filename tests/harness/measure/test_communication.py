"""Unions of intervals, and the metrics of a step."""

from __future__ import annotations

import json

import pytest

from harness.measure.communication import (
    Event,
    NothingRecorded,
    StepRecord,
    delay_for,
    exposed,
    exposed_latencies,
    exposed_seconds,
    overlap_seconds,
    summarise,
    union,
    union_seconds,
)


def event(
    operation="all_reduce", *, payload=400, wire=400, launched=0.0, completed=1.0, blocked=(), ranks=(0, 1)
) -> Event:
    return Event(
        operation=operation,
        ranks=ranks,
        dtype="float32",
        payload_bytes=payload,
        wire_bytes=wire,
        transport="gloo",
        launched=launched,
        returned=launched,
        completed=completed,
        blocked=tuple(blocked),
    )


def step(*events: Event, start=0.0, end=10.0) -> StepRecord:
    return StepRecord(start=start, end=end, events=events)


def test_union_merges_what_touches_and_drops_what_is_empty():
    assert union([(5, 6), (0, 1), (0.5, 2), (2, 3), (4, 4), (7, 6.5)]) == [(0, 3), (5, 6)]
    assert union([]) == []
    assert union_seconds([(0, 10), (1, 2), (3, 4)]) == 10


def test_two_overlapping_collectives_under_compute():
    """Two 1 s intervals that overlap by half, under 1.5 s of compute: durations summed would say 2 s."""
    compute, communication = [(0.0, 1.5)], [(1.0, 2.0), (1.5, 2.5)]
    assert union_seconds(communication) == 1.5
    assert overlap_seconds(compute, communication) == 0.5
    assert exposed_seconds(compute, communication) == 1.0
    hidden = [(0.0, 1.0), (0.5, 1.5)]
    assert (overlap_seconds(compute, hidden), exposed_seconds(compute, hidden)) == (1.5, 0.0)


def test_a_step_counts_only_what_lies_within_it():
    late = event(launched=9.0, completed=12.0, blocked=[(9.0, 9.5), (9.25, 9.75)])
    record = step(late, event(launched=1.0, completed=3.0), event(launched=2.0, completed=4.0))
    assert record.busy_seconds() == 3.0 + 1.0
    assert record.blocked_seconds() == 0.75


def test_summary_is_of_the_largest_rank_and_per_step():
    busy = step(event(completed=4.0, blocked=[(0.0, 1.0)]), event("broadcast", payload=8, wire=16, completed=2.0))
    idle = step(event(completed=2.0), end=4.0)
    metrics = summarise([[busy, busy], [idle, step(event(completed=1.0))]])
    assert metrics == {
        "communication.calls_per_step": 2,
        "communication.payload_bytes_per_step": 408,
        "communication.bytes_per_step": 416,
        "communication.calls.all_reduce": 1,
        "communication.payload_bytes.all_reduce": 400,
        "communication.bytes.all_reduce": 400,
        "communication.calls.broadcast": 1,
        "communication.payload_bytes.broadcast": 8,
        "communication.bytes.broadcast": 16,
        "communication.busy_ratio": 0.4,
        "communication.blocked_ratio": 0.1,
    }


def test_seeing_nothing_is_an_error_among_several_ranks_only():
    with pytest.raises(NothingRecorded, match="each of 2 ranks, none recorded on rank 1"):
        summarise([[step(event())], [step(), step()]])
    assert summarise([[step()]])["communication.bytes_per_step"] == 0
    with pytest.raises(ValueError, match=r"at least one step of each rank, got \[1, 0\]"):
        summarise([[step(event())], []])


def test_exposed_is_the_difference_of_medians_and_never_negative():
    metrics = exposed([0.5, 0.4, 9.0], [0.3, 0.375, 0.4])
    assert metrics == {
        "communication.exposed_seconds": 0.125,
        "communication.exposed_ratio": 0.25,
    }
    assert set(exposed([1.0], [1.5]).values()) == {0.0}
    with pytest.raises(ValueError, match="got 1 and 0"):
        exposed([1.0], [])


def test_exposed_latencies_are_what_a_step_gets_longer_by_over_the_delay():
    assert exposed_latencies([0.5, 0.4, 9.0], [1.0, 1.1, 9.0], 0.2) == {
        "communication.exposed_latencies_per_step": pytest.approx(3.0),
        "communication.delay_seconds": 0.2,
    }
    assert exposed_latencies([1.0], [0.9], 0.1)["communication.exposed_latencies_per_step"] == 0.0
    with pytest.raises(ValueError, match=r"a delay above 0 s, got 1, 0 and 0\.1 s"):
        exposed_latencies([1.0], [], 0.1)
    with pytest.raises(ValueError, match="got 1, 1 and 0 s"):
        exposed_latencies([1.0], [1.0], 0)


@pytest.mark.parametrize(
    ("null_seconds", "calls", "delay"),
    [
        ([0.4, 0.2, 9.0], 10, 0.1),  # a quarter of the median null step
        ([0.01], 10, 0.02),
        ([0.4], 300, 0.01),  # 300 of them in 3 s
        ([0.01], 0, 0.02),
    ],
)
def test_the_delay_is_large_against_a_step_and_not_endless(null_seconds, calls, delay):
    assert delay_for(null_seconds, calls) == pytest.approx(delay)


def test_records_survive_json():
    record = step(event(blocked=[(0.0, 0.5)]), event("send", ranks=(1, 0)))
    assert StepRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
