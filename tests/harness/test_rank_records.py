from pathlib import Path
from typing import Any

import pytest
import torch

from harness.layout import Layout
from harness.rank_records import assemble

STEPS = 2


def record(sums: list[float | None], checksum: str = "a") -> dict[str, Any]:
    return {
        "loss_sums": sums,
        "global_num_tokens": [4, 5],
        "norms": [1.5, 2.5],
        "skipped": [False, True],
        "rates": [(0.1,), (0.2,)],
        "checksums": [checksum] * STEPS,
        "evaluation": None,
    }


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    one = {"weight": torch.ones(2)}
    path = tmp_path / "tensors.pt"
    torch.save({"gradients": {0: one}, "starting_parameters": one, "parameters": one, "buffers": {}}, path)
    return path


def test_a_loss_is_the_sum_over_ranks_over_the_global_count(tensors: Path) -> None:
    trajectory = assemble([record([6.0, 1.0]), record([2.0, 9.0], "b")], tensors, Layout(data=2))
    assert trajectory.losses == [2.0, 2.0]
    assert trajectory.gradient_norms == [1.5, 2.5]
    assert trajectory.skipped == [False, True]
    assert trajectory.learning_rates == [(0.1,), (0.2,)]
    assert trajectory.replica_checksums == {0: ["a 1.5", "a 2.5"], 1: ["b 1.5", "b 2.5"]}
    assert trajectory.replica_groups == ((0, 1),)
    assert trajectory.gradients[0]["weight"].tolist() == [1.0, 1.0]


def test_a_tensor_group_holds_one_loss(tensors: Path) -> None:
    assert assemble([record([8.0, 5.0]), record([8.0, 5.0])], tensors, Layout(tensor=2)).losses == [2.0, 1.0]


def test_the_loss_lives_on_the_last_stage(tensors: Path) -> None:
    layout = Layout(data=2, pipeline=2)
    first, last = record([None, None]), record([4.0, 5.0])
    assert assemble([first, first, last, last], tensors, layout).losses == [2.0, 2.0]


def test_an_evaluation_is_over_the_targets_of_the_ranks_that_hold_its_loss(tensors: Path) -> None:
    def evaluated(loss_sum: float | None, num_tokens: int) -> dict[str, Any]:
        held = None if loss_sum is None else 1.0
        return record([held, held]) | {"evaluation": {"loss_sum": loss_sum, "num_tokens": num_tokens}}

    stages = [evaluated(None, 3), evaluated(None, 5), evaluated(7.0, 3), evaluated(9.0, 5)]
    assert assemble(stages, tensors, Layout(data=2, pipeline=2)).evaluation_loss == 2.0
    slices = [evaluated(6.0, 3), evaluated(6.0, 3)]
    assert assemble(slices, tensors, Layout(tensor=2)).evaluation_loss == 2.0
    assert assemble([record([1.0, 1.0])], tensors, Layout()).evaluation_loss is None
    with pytest.raises(ValueError, match="evaluation: expected the loss on some rank, every rank answered none"):
        assemble([record([1.0, 1.0]) | {"evaluation": {"loss_sum": None, "num_tokens": 3}}], tensors, Layout())


def test_a_loss_that_nobody_holds_is_an_error_and_no_zero(tensors: Path) -> None:
    with pytest.raises(ValueError, match="step 1: expected the loss on some rank, every rank answered none"):
        assemble([record([1.0, None]), record([1.0, None])], tensors, Layout(data=2))
