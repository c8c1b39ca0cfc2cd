"""Bytes on the wire by the closed forms, unions of intervals, and the metrics of a step."""

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
    wire_bytes,
)

MIB = 1 << 20


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


@pytest.mark.parametrize(
    ("operation", "expected"),  # of 1 MiB at world sizes 2 and 4
    [
        ("all_reduce", (MIB, 3 * MIB // 2)),
        ("all_reduce_coalesced", (MIB, 3 * MIB // 2)),
        ("reduce_scatter_tensor", (MIB // 2, 3 * MIB // 4)),
        ("reduce_scatter", (MIB // 2, 3 * MIB // 4)),
        ("reduce_scatter_tensor_coalesced", (MIB // 2, 3 * MIB // 4)),
        ("all_gather", (MIB // 2, 3 * MIB // 4)),
        ("all_gather_into_tensor", (MIB // 2, 3 * MIB // 4)),
        ("all_gather_into_tensor_coalesced", (MIB // 2, 3 * MIB // 4)),
        ("all_to_all_single", (MIB // 2, 3 * MIB // 4)),
        ("send", (MIB, MIB)),
        ("recv", (0, 0)),
        ("barrier", (0, 0)),
    ],
)
def test_ring_bytes_of_one_mebibyte(operation, expected):
    assert tuple(wire_bytes(operation, MIB, size) for size in (2, 4)) == expected


def test_data_parallel_and_sharded_volumes():
    """DDP and ZeRO-1/2 move 2(n-1)/n S a step, ZeRO-3, which gathers again for backward, 3(n-1)/n S."""
    size, num_ranks = 12 * MIB, 4
    gather = wire_bytes("all_gather_into_tensor", size, num_ranks)
    scatter = wire_bytes("reduce_scatter_tensor", size, num_ranks)
    assert wire_bytes("all_reduce", size, num_ranks) == scatter + gather == 18 * MIB
    assert 2 * gather + scatter == 27 * MIB


def test_gloo_reduce_scatter_costs_an_all_reduce():
    assert wire_bytes("reduce_scatter_tensor", MIB, 4, "gloo") == wire_bytes("all_reduce", MIB, 4)


@pytest.mark.parametrize(
    ("algorithm", "operation", "sent"),  # by each of 4 ranks, root 1, in quarters of a MiB
    [
        ("ring", "broadcast", [0, 4, 4, 4]),  # rank 0 is the last one on the ring from rank 1
        ("gloo", "broadcast", [0, 8, 4, 0]),
        ("ring", "reduce", [4, 0, 4, 4]),
        ("gloo", "reduce", [4, 3, 4, 4]),
        ("ring", "gather", [1, 0, 1, 1]),
        ("ring", "scatter", [0, 3, 0, 0]),
    ],
)
def test_rooted_operations(algorithm, operation, sent):
    bytes_sent = [wire_bytes(operation, MIB, 4, algorithm, group_rank=rank, root=1) for rank in range(4)]
    assert bytes_sent == [quarters * MIB // 4 for quarters in sent]


@pytest.mark.parametrize("num_ranks", range(1, 10))
@pytest.mark.parametrize("root", [0, 2])
def test_gloo_broadcast_delivers_to_every_other_rank_once(num_ranks, root):
    root %= num_ranks
    sent = [wire_bytes("broadcast", 7, num_ranks, "gloo", group_rank=rank, root=root) for rank in range(num_ranks)]
    assert sum(sent) == 7 * (num_ranks - 1)


def test_gloo_reduce_sends_more_than_its_ring_needs():
    """Measured in eighths of 8 MiB, root 1: [10, 6] at world 2, [9, 6, 9] at world 3."""
    for measured in ([10, 6], [9, 6, 9]):
        num_ranks = len(measured)
        sent = [wire_bytes("reduce", 8 * MIB, num_ranks, "gloo", group_rank=rank, root=1) for rank in range(num_ranks)]
        assert sent == [eighths * MIB for eighths in measured]


def test_one_rank_sends_nothing():
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"):
        for algorithm in ("ring", "gloo"):
            assert wire_bytes(operation, MIB, 1, algorithm) == 0


def test_bytes_are_rounded_up():
    assert wire_bytes("all_reduce", 10, 3) == 14  # 13.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduced", 1, 2), "expected a collective of torch.distributed, got 'all_reduced'"),
        (("all_reduce", -1, 2), "got -1 bytes"),
        (("all_reduce", 1, 0), "group size 0"),
    ],
)
def test_bad_input_to_the_formulas(arguments, message):
    with pytest.raises(ValueError, match=message):
        wire_bytes(*arguments)


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
