"""Who steps what under DeepSpeed's stages 1 and 2, and what a rank holds meanwhile; none of it needs the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.datasets import Tensors
from harness.layout import Layout
from harness.measure.predicted_memory import predicted
from harness.parameters import LogicalParameter
from harness.workload import Training, Workload
from impls.deepspeed.parts.zero_partition import Piece, partition_of
from impls.deepspeed.zero import DeepSpeedZero


def parameter(name: str, num_elements: int, *, decayed: bool = True, trainable: bool = True) -> LogicalParameter:
    return LogicalParameter(name=name, shape=(num_elements,), dtype=torch.float32, trainable=trainable, decayed=decayed)


def test_groups_are_cut_evenly_wherever_that_falls() -> None:
    parameters = [
        parameter("a", 5),
        parameter("frozen", 100, trainable=False),
        parameter("bias", 1, decayed=False),
        parameter("b", 2),
        parameter("empty", 0),
        parameter("c", 4),
        parameter("d", 3),
    ]
    partition = partition_of(parameters, 2)
    assert partition.pieces == {
        "a": [Piece(0, 5)],
        "b": [Piece(0, 2)],
        "c": [Piece(0, 1), Piece(1, 3)],  # 14 elements are 16 with padding, 8 a rank
        "d": [Piece(1, 3)],
        "bias": [Piece(0, 1)],  # 1 element is 4 with padding
    }
    assert partition.sharded_elements == [8, 2]
    assert [partition.kept_elements(rank) for rank in (0, 1)] == [5 + 2 + 4 + 1, 4 + 3]
    assert partition.largest_rank() == 0


def test_a_parameter_may_span_several_ranks() -> None:
    partition = partition_of([parameter("a", 3), parameter("b", 21)], 4)
    assert partition.pieces == {"a": [Piece(0, 3)], "b": [Piece(0, 3), Piece(1, 6), Piece(2, 6), Piece(3, 6)]}
    assert [partition.kept_elements(rank) for rank in range(4)] == [24, 21, 21, 21]


P = 4 * (600 * 600 + 600)  # bytes of one layer


@pytest.mark.parametrize(
    ("options", "beside_states"),
    [
        # All gradients, and the copy in which they are summed.
        ({"stage": 0}, 2 * 3 * P),
        # The bucket is full, and so is the copy.
        ({"stage": 1}, 2 * 3 * P),
        ({"stage": 2}, 2 * 3 * P),
        # Two of three gradients are left beside the bucket when the first is copied and then summed in place.
        ({"stage": 1, "reduce_scatter": False}, 2 * 3 * P),
        ({"stage": 2, "reduce_scatter": False}, 3 * P + 2 * P),
        ({"stage": 2, "overlap_comm": True}, 3 * 3 * P),
        ({"stage": 2, "contiguous_gradients": False}, 2 * 3 * P),
    ],
    ids=str,
)
def test_the_plan_holds_what_lives_at_a_time(options: dict[str, Any], beside_states: int) -> None:
    """Three layers alike and so small a batch that activations are a few KB; two ranks."""
    workload = Workload(
        name="layers",
        model=lambda: nn.Sequential(*(nn.Linear(600, 600) for _ in range(3))),
        dataset=Tensors(torch.zeros(8, 600), torch.zeros(8, 600)),
        loss=lambda outputs, targets: (outputs - targets).square().sum(),
        training=Training(global_batch_size=2, learning_rate=0.1),
        unit="samples",
    )
    plan = predicted(workload, DeepSpeedZero, Layout(data=2), options)
    states = 3 * P + (2 * 3 * P if not options["stage"] else 3 * 3 * P / 2)
    assert plan["memory.predicted_peak_bytes"] - states == pytest.approx(beside_states, rel=0.02)
    assert plan["memory.predicted_activation_bytes"] < 50_000
