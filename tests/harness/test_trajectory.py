from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_training import reference

from harness.trajectory import Trajectory


def test_a_saved_trajectory_comes_back(tmp_path: Path) -> None:
    run = replace(reference("fp32"), replica_groups=((0, 2), (1, 3)))
    run.save(tmp_path / "run.pt")
    loaded = Trajectory.load(tmp_path / "run.pt")
    assert (loaded.losses, loaded.gradient_norms, loaded.skipped) == (run.losses, run.gradient_norms, run.skipped)
    assert loaded.learning_rates == run.learning_rates
    assert (loaded.replica_checksums, loaded.replica_groups) == (run.replica_checksums, ((0, 2), (1, 3)))
    for name in run.parameters:
        assert torch.equal(loaded.parameters[name], run.parameters[name])
        assert torch.equal(loaded.gradients[1][name], run.gradients[1][name])


def test_another_file_is_refused(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt: expected a trajectory with .*, found weights"):
        Trajectory.load(tmp_path / "other.pt")


def test_series_of_unlike_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="losses 3, gradient_norms 4, skipped 4"):
        replace(reference("fp32"), losses=[1.0, 2.0, 3.0])


def test_gradients_of_a_step_that_was_not_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gradients of steps \[7\] in a run of 4 steps"):
        replace(reference("fp32"), gradients={7: {}})
