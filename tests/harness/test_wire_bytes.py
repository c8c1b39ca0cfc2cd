"""Bytes on the wire by the closed forms."""

from __future__ import annotations

import pytest

from harness.wire_bytes import wire_bytes

MIB = 1 << 20


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
