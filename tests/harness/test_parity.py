import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_training import FAULTS, gpt_workload, reference, right, tolerance, train, trained

from harness.differences import differences
from harness.parity import Tolerance, compare
from harness.result import Parity
from harness.trajectory import Trajectory

LANES = ("fp64", "fp32", "bf16")
KEY = slice(16, 32)  # the key's third of a fused bias at width 16: its gradient is mathematically zero
FUSED_BIAS = "block0.attention.query_key_value.bias"


def held(case: Trajectory, lane: str = "fp64") -> Parity:
    return compare(case, reference(lane), tolerance(lane))


def with_gradient(case: Trajectory, step: int, **changed: Tensor | None) -> Trajectory:
    """Names with dots cannot be keywords: dots are written as two underscores."""
    gradients = dict(case.gradients[step])
    for key, value in changed.items():
        name = key.replace("__", ".")
        if value is None:
            del gradients[name]
        else:
            gradients[name] = value
    return replace(case, gradients={**case.gradients, step: gradients})


@pytest.mark.parametrize("lane", LANES)
def test_a_right_case_passes_though_it_adds_in_another_order(lane: str) -> None:
    parity = held(trained(lane), lane)
    assert parity.ok, parity.explanation
    assert (parity.first_bad_step, parity.explanation, parity.replicas_bit_equal) == (None, None, True)
    assert parity.lane == lane
    # Not bit for bit the same run: the lane was really needed.
    assert 0 < parity.gradient_max_relative < parity.tolerance["gradient"]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_fails_in_every_lane(lane: str, fault: str) -> None:
    parity = held(trained(lane, fault), lane)
    assert not parity.ok
    assert parity.first_bad_step == 0
    assert parity.gradient_max_relative > parity.tolerance["gradient"]


def test_sgd_passes_and_a_wrong_scale_shows_in_its_parameters_too() -> None:
    truth = train(gpt_workload("fp64", optimizer="sgd"), data_degree=1)
    assert compare(train(gpt_workload("fp64", optimizer="sgd")), truth, Tolerance.exact()).ok
    twice = train(gpt_workload("fp64", optimizer="sgd"), FAULTS["times data degree"])
    assert compare(twice, truth, Tolerance.exact()).parameter_max_relative > 0.5
    # AdamW hides it there: 2e-5 of the update.
    assert held(trained("fp64", "times data degree")).parameter_max_relative < 1e-3


@pytest.mark.parametrize("name", sorted(reference("fp32").gradients[0]))
def test_fp32_sees_one_percent_in_one_parameters_gradient(name: str) -> None:
    case = trained("fp32")
    gradient = case.gradients[0][name] * 1.01
    parity = held(with_gradient(case, 0, **{name.replace(".", "__"): gradient}), "fp32")
    assert (parity.ok, parity.first_bad_step, parity.worst_parameter) == (False, 0, name)
    assert name in str(parity.explanation)


def test_fp32_sees_a_thousandth_of_the_whole_gradient() -> None:
    case = trained("fp32")
    scaled = {step: {name: g * 1.001 for name, g in of_step.items()} for step, of_step in case.gradients.items()}
    assert not held(replace(case, gradients=scaled), "fp32").ok
    norms = [norm * 1.001 for norm in case.gradient_norms if norm is not None]
    assert not held(replace(case, gradient_norms=norms), "fp32").ok


def test_noise_never_opens_the_gate_beyond_its_bounds() -> None:
    truth = reference("fp32")
    louder = replace(truth, gradients={0: {name: g * 1.5 for name, g in truth.gradients[0].items()}, 1: {}})
    louder = replace(louder, gradients={**louder.gradients, 1: truth.gradients[1]})
    assert Tolerance.from_noise(truth, louder).gradient == 5e-3
    silent = Tolerance.from_noise(truth, truth)
    assert (silent.loss, silent.gradient_norm, silent.gradient, silent.parameter) == (2e-6, 2e-6, 6e-5, 3e-5)
    assert Tolerance.from_seeds([(louder, truth)]).gradient == 0.45


def test_noise_is_multiplied_by_its_factor() -> None:
    truth = reference("fp32")
    other = replace(truth, losses=[loss * (1 + 1e-6) for loss in truth.losses])
    assert Tolerance.from_noise(truth, other, factor=8).loss == pytest.approx(8e-6, rel=1e-3)
    assert Tolerance.from_noise(truth, truth, other, factor=8).loss == pytest.approx(8e-6, rel=1e-3)


def test_what_updates_make_of_rounding_hides_nothing_at_the_first_step() -> None:
    """Noise of 1e-4 after an update allows as much there; before it the same difference is still a fault."""
    truth = reference("fp32")

    def with_noise(step: int) -> Trajectory:
        gradients = {name: g * (1 + 1e-4) for name, g in truth.gradients[step].items()}
        return replace(truth, gradients={**truth.gradients, step: gradients})

    allowed = Tolerance.from_noise(truth, with_noise(1))
    assert allowed.gradient == pytest.approx(8e-4, rel=0.01)
    assert compare(with_noise(1), truth, allowed).ok
    parity = compare(with_noise(0), truth, allowed)
    assert not parity.ok
    assert parity.first_bad_step == 0
    assert parity.tolerance["first_gradient"] == 6e-5
    assert parity.tolerance["first_loss"] == 2e-6


def test_a_reference_that_disagrees_with_itself_is_an_error() -> None:
    truth = reference("fp32")
    with pytest.raises(ValueError, match="the reference disagrees with itself at step 2: the loss is nan"):
        Tolerance.from_noise(truth, replace(truth, losses=[*truth.losses[:2], math.nan, truth.losses[3]]))
    with pytest.raises(ValueError, match="expected at least one pair of trajectories"):
        Tolerance.from_seeds([])


def test_an_update_made_of_rounding_noise_does_not_alarm() -> None:
    case = trained("fp64")
    gradient = case.gradients[0][FUSED_BIAS].clone()
    assert 0 < gradient[KEY].abs().max() < 1e-15
    gradient[KEY] = 1e-17 * torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = case.parameters[FUSED_BIAS].clone()
    moved[KEY] += 1e-3
    name = FUSED_BIAS.replace(".", "__")
    noisy = replace(with_gradient(case, 0, **{name: gradient}), parameters=case.parameters | {FUSED_BIAS: moved})
    assert held(noisy).ok
    # But its size is bounded, and the elements that are not noise are judged as ever.
    moved = moved.clone()
    moved[KEY] += 0.1
    assert not held(replace(noisy, parameters=case.parameters | {FUSED_BIAS: moved})).ok
    moved = case.parameters[FUSED_BIAS].clone()
    moved[0] += 1e-12
    assert not held(replace(noisy, parameters=case.parameters | {FUSED_BIAS: moved})).ok


def test_one_element_that_was_never_stepped_fails_in_fp32() -> None:
    case, name = trained("fp32"), "block1.perceptron.expansion.weight"
    stuck = case.parameters[name].clone()
    stuck[3, 5] = case.starting_parameters[name][3, 5]
    parity = held(replace(case, parameters=case.parameters | {name: stuck}), "fp32")
    assert (parity.ok, parity.worst_parameter, parity.first_bad_step) == (False, name, 3)


def test_a_frozen_parameter_must_not_move() -> None:
    frozen = {"frozen": torch.ones(3, dtype=torch.float64), "zero": torch.zeros(3, dtype=torch.float64)}
    truth = reference("fp64")
    truth = replace(truth, parameters=truth.parameters | frozen, starting_parameters=truth.starting_parameters | frozen)
    assert compare(truth, truth, Tolerance.exact()).ok
    for name, value in frozen.items():
        moved = replace(truth, parameters=truth.parameters | {name: value + 1e-9})
        assert compare(moved, truth, Tolerance.exact()).worst_parameter == name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_fails_with_its_name(bad: float) -> None:
    case, name = trained("fp64"), "head.norm.bias"
    gradient = case.gradients[1][name].clone()
    gradient[0] = bad
    parity = held(with_gradient(case, 1, head__norm__bias=gradient))
    assert (parity.ok, parity.worst_parameter, parity.first_bad_step) == (False, name, 1)
    assert parity.explanation == f"parts at step 1: the gradient of {name!r} is not finite"
    parameters = case.parameters | {name: gradient}
    assert f"parameter of {name!r} is not finite" in str(held(replace(case, parameters=parameters)).explanation)
    losses = [*case.losses[:2], bad, case.losses[3]]
    parity = held(replace(case, losses=losses))
    assert (parity.ok, parity.first_bad_step, parity.loss_max_relative) == (False, 2, math.inf)
    # Nor does it pass because the reference has it too.
    assert not compare(replace(case, losses=losses), replace(case, losses=losses), Tolerance.exact()).ok


def test_missing_and_surplus_names_and_shapes_fail_with_their_name() -> None:
    case, name = trained("fp64"), "head.norm.bias"
    without = held(with_gradient(case, 0, head__norm__bias=None))
    assert without.explanation == "parts at step 0: the gradient of 'head.norm.bias' is missing"
    assert without.gradient_max_relative == math.inf
    surplus = held(with_gradient(case, 0, unused=torch.zeros(2)))
    assert surplus.explanation == "parts at step 0: a gradient of 'unused', which the reference has not"
    cut = held(replace(case, parameters=case.parameters | {name: case.parameters[name][:3]}))
    assert cut.explanation == "parts at step 3: the parameter of 'head.norm.bias' has shape [3], not [16]"
    assert not held(replace(case, gradients={0: case.gradients[0]})).ok
    norms = [None, *case.gradient_norms[1:]]
    assert (
        held(replace(case, gradient_norms=norms)).explanation == "parts at step 0: no gradient norm was told at step 0"
    )


def test_starting_weights_must_be_the_same_bits_except_in_bf16() -> None:
    case, name = trained("fp64"), "head.norm.weight"
    other = replace(case, starting_parameters=case.starting_parameters | {name: case.starting_parameters[name] + 1e-15})
    parity = held(other)
    assert (parity.ok, parity.first_bad_step, parity.worst_parameter) == (False, 0, name)
    assert "starting weights of 'head.norm.weight'" in str(parity.explanation)
    starting, exact = trained("bf16").starting_parameters, reference("bf16").starting_parameters
    assert any(not torch.equal(starting[name], exact[name]) for name in exact)


def test_buffers_are_compared_and_integers_exactly() -> None:
    count, average = {"num_batches": torch.tensor(4)}, {"running_mean": torch.ones(3, dtype=torch.float64)}
    truth = replace(reference("fp64"), buffers=count | average)
    assert compare(truth, truth, Tolerance.exact()).ok
    off_by_one = replace(truth, buffers=truth.buffers | {"num_batches": torch.tensor(5)})
    assert compare(off_by_one, truth, Tolerance.exact()).worst_parameter == "num_batches"
    drifted = replace(truth, buffers=truth.buffers | {"running_mean": average["running_mean"] * (1 + 1e-9)})
    assert compare(drifted, truth, Tolerance.exact()).worst_parameter == "running_mean"
    assert not compare(replace(truth, buffers=count), truth, Tolerance.exact()).ok


def test_replicas_must_hold_the_same_bits_within_their_group() -> None:
    case = trained("fp64")
    sums = {rank: ["a", "b", "c", "d"] for rank in range(4)}
    assert held(replace(case, replica_checksums=sums)).ok
    drifting = sums | {2: ["a", "b", "x", "y"]}
    parity = held(replace(case, replica_checksums=drifting))
    assert (parity.ok, parity.replicas_bit_equal, parity.first_bad_step) == (False, False, 2)
    assert parity.explanation == "parts at step 2: rank 2 and rank 0 no longer hold the same bits"
    # Ranks 0 and 2 hold one half of the model, ranks 1 and 3 the other.
    halves = {rank: ["left" if rank % 2 == 0 else "right"] * 4 for rank in range(4)}
    groups = ((0, 2), (1, 3))
    assert held(replace(case, replica_checksums=halves, replica_groups=groups)).ok
    assert not held(replace(case, replica_checksums=halves)).ok
    del halves[3]
    assert not held(replace(case, replica_checksums=halves, replica_groups=groups)).ok


def test_learning_rates_are_compared_as_distinct_values() -> None:
    case = trained("fp64")
    one_group = [(rates[0],) for rates in case.learning_rates]
    assert held(replace(case, learning_rates=one_group)).ok
    wrong = [*case.learning_rates[:2], (1e-3, 2e-3), case.learning_rates[3]]
    parity = held(replace(case, learning_rates=wrong))
    assert parity.explanation == "parts at step 2: the learning rate is 0.001 and 0.002 where the reference has 0.001"


def test_a_step_that_both_skip_may_be_infinite() -> None:
    case = trained("fp64")
    infinite = {name: torch.full_like(g, math.inf) for name, g in case.gradients[1].items()}
    skipping = replace(
        case,
        skipped=[False, True, False, False],
        losses=[case.losses[0], math.inf, *case.losses[2:]],
        gradient_norms=[case.gradient_norms[0], math.nan, *case.gradient_norms[2:]],
        gradients={0: case.gradients[0], 1: infinite},
    )
    assert compare(skipping, skipping, Tolerance.exact()).ok
    parity = compare(skipping, replace(skipping, skipped=[False] * 4), Tolerance.exact())
    assert parity.explanation == "parts at step 1: the case, not the reference, skipped the update of step 1"


def test_another_number_of_steps_is_refused() -> None:
    short = train(gpt_workload("fp64"), right, num_steps=3)
    with pytest.raises(ValueError, match=r"expected the reference's number of steps \(4\), got 3"):
        differences(short, reference("fp64"))
