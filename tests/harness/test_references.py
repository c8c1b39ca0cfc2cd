from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import models
from harness.case import Case, Measurement
from harness.differences import differences, largest
from harness.launch.failure import LaunchFailed
from harness.layout import Layout
from harness.references import References, lane_of, round_otherwise

FAULTY = Path(__file__).with_name("launch") / "faulty.py"
SMALL = "awkward:kind=unequal_tokens"


def case(workload: str = SMALL, precision: str = "fp64", data: int = 2) -> Case:
    measurement = Measurement(parity_steps=3, timed_steps=0)
    return Case(
        workload=workload,
        implementation="native.ddp",
        layout=Layout(data=data),
        precision=precision,
        measurement=measurement,
    )


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    directory = tmp_path_factory.mktemp("references")
    made = References(directory, directory / "logs")
    yield made
    made.close()


def pid(references: References) -> int:
    assert references._process is not None
    return references._process.pids[0]


def test_one_process_makes_them_all_and_each_once(references: References) -> None:
    first = references.trajectory(case())
    process = pid(references)
    assert references.trajectory(case(data=3)) is first
    references.trajectory(case("awkward:kind=tied"))
    assert references.tolerance(case(precision="fp32")) is references.tolerance(case(precision="fp32"))
    assert pid(references) == process


def test_weights_are_those_of_the_seed_whatever_the_training(references: References) -> None:
    weights = references.weights(SMALL)
    assert references.weights(models.with_options(SMALL, learning_rate=0.5, num_micro_batches=1)) == weights
    assert references.weights(models.with_options(SMALL, seed=9)) != weights
    expected = models.load(SMALL).build_model().state_dict()
    found = torch.load(weights, weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_yardstick_follows_the_precision(references: References) -> None:
    assert [lane_of(precision) for precision in ("fp64", "fp32", "bf16")] == ["fp64", "fp32", "fp32"]
    lanes = {precision: references.tolerance(case(precision=precision)).lane for precision in ("fp64", "fp32", "bf16")}
    assert lanes == {precision: precision for precision in lanes}
    assert references.trajectory(case(precision="bf16")) is references.trajectory(case(precision="fp32"))


def test_weights_are_rounded_otherwise_by_one_unit_in_the_last_place() -> None:
    weight = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    weight[0] = 0.0
    weight[1, 0] = -torch.inf
    mask = torch.full((32,), torch.finfo(torch.float32).min)
    before, tied = weight.clone(), weight.view(64, 8)
    half = torch.ones(4, dtype=torch.float16)
    round_otherwise([weight, tied, half, mask])
    assert mask.isfinite().all()
    units = weight.view(torch.int32) - before.view(torch.int32)  # neighbouring floats are neighbouring integers
    assert units[0].eq(0).all()
    assert units[1, 0] == 0
    assert units[1, 1:].abs().eq(1).all()
    assert units[2:].abs().eq(1).all()
    assert 0.3 < units[2:].gt(0).float().mean() < 0.7
    assert half.eq(1).all()


def test_room_is_left_for_another_order_of_additions_within_a_layer(references: References) -> None:
    """Another split of the batch alone shows too little of it: a twentieth, in parameters that AdamW has stepped."""
    done = case("awkward:kind=tied", precision="fp32")
    reference = references.trajectory(done)
    rounded = references._train(replace(references._run_for(done), rounded_otherwise=True), None)
    found = references.tolerance(done)
    distance = largest(differences(rounded, reference), "parameter")
    assert 8 * distance > 3e-5  # which is allowed whatever the noise
    assert found.parameter >= 8 * distance
    assert found.starting_weights == 0.0


def test_a_death_between_two_cases_does_no_harm(references: References) -> None:
    references.weights(SMALL)
    process = pid(references)
    os.kill(process, signal.SIGKILL)
    time.sleep(0.2)
    assert references.trajectory(replace(case(), workload="awkward:kind=clipped")).num_steps == 3
    assert pid(references) != process


def test_a_failure_harms_no_other_case_and_makes_no_rank_the_culprit(references: References) -> None:
    with pytest.raises(LaunchFailed) as raised:
        references.weights(f"{FAULTY}:unbuildable")
    assert (raised.value.status, raised.value.culprit) == ("failed", None)
    assert raised.value.reason == "the reference: rank 0: RuntimeError: no such layer"
    assert references.trajectory(case("awkward:kind=decay_groups")).num_steps == 3


def test_what_timed_out_is_not_waited_for_again(tmp_path: Path) -> None:
    references = References(tmp_path, tmp_path / "logs", deadline_seconds=2.0)
    try:
        for longest in (20.0, 0.5):
            began = time.monotonic()
            with pytest.raises(LaunchFailed, match=r"the reference: .*deadline of 2 s"):
                references.weights(f"{FAULTY}:endless")
            assert time.monotonic() - began < longest
    finally:
        references.close()
