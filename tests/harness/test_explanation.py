from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from toy_training import (
    DATA_DEGREE,
    FAULTS,
    Gradients,
    Reduction,
    gpt_workload,
    reference,
    right,
    tolerance,
    train,
    trained,
)

from harness.differences import differences
from harness.explanation import explain
from harness.layout import Layout
from harness.parity import Tolerance
from harness.shares import gradients_by_use, partial_gradients
from harness.trajectory import Trajectory
from harness.workload import Workload

LAYOUT = Layout(data=DATA_DEGREE)
REPORTS = {
    "no reduction, global count": "every gradient holds rank 0's share alone: not reduced, divided by the global token "
    "count (68)",
    "no reduction, own count": "every gradient holds rank 0's share alone: not reduced, divided by rank 0's own token "
    "count (30)",
    "no reduction, mean of means": "every gradient holds rank 0's share alone, a mean of means over its micro-batches: "
    "not reduced",
    "never divided": "every gradient is 68 x the right one: never divided by the global token count (68)",
    "double average": "every gradient is 0.5 x the right one: divided once more by the data degree (2)",
    "times data degree": "every gradient is 2 x the right one: multiplied by the data degree (2)",
    "divided by micro-batches": "every gradient is 0.333333 x the right one: divided once more by the number of "
    "micro-batches (3)",
    "mean of means over ranks": "every gradient is a mean of means over the data ranks: each divided by its own token "
    "count (30, 38), then averaged",
    "mean of means over micro-batches": "every gradient is a mean of means over the micro-batches: each divided by its "
    "own token count (16, 22, 30), then averaged",
    "mean of means over both": "every gradient is a mean of means over data ranks and micro-batches: each divided by "
    "its own token count, then averaged",
    "last micro-batch": "every gradient holds the last micro-batch alone: divided by the global token count (68)",
    "first micro-batch": "every gradient holds the first micro-batch alone: divided by the global token count (68)",
    "micro-batch 1 lost": "every gradient lacks micro-batch 1: divided by the global token count (68)",
    "identical data": "every gradient holds rank 0's share alone: counted 2 times, as with identical data on every "
    "rank",
}


def explained(case: Trajectory, lane: str = "fp64", layout: Layout = LAYOUT) -> str:
    workload = gpt_workload("fp64" if lane == "fp64" else "fp32")
    return str(explain(case, reference(lane), tolerance(lane), workload, layout))


def with_gradients(case: Trajectory, step: int, change: Callable[[str, Gradients], torch.Tensor]) -> Trajectory:
    gradients = {name: change(name, case.gradients[step]) for name in case.gradients[step]}
    return replace(case, gradients=case.gradients | {step: gradients})


def test_every_fault_has_its_report() -> None:
    assert REPORTS.keys() == FAULTS.keys()


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
@pytest.mark.parametrize("fault", REPORTS)
def test_each_fault_is_recognised(lane: str, fault: str) -> None:
    sentence = explained(trained(lane, fault), lane)
    assert sentence.startswith("parts at step 0, worst in ")
    assert sentence.endswith(f"; {REPORTS[fault]}")


@pytest.mark.parametrize(
    "fault", ["no reduction, own count", "mean of means over ranks", "mean of means over both", "last micro-batch"]
)
def test_large_faults_are_recognised_in_bf16(fault: str) -> None:
    assert explained(trained("bf16", fault), "bf16").endswith(REPORTS[fault])


@pytest.mark.parametrize("lane", ["fp64", "fp32", "bf16"])
def test_a_right_case_needs_no_explanation(lane: str) -> None:
    workload = gpt_workload("fp64" if lane == "fp64" else "fp32")
    assert explain(trained(lane), reference(lane), tolerance(lane), workload, LAYOUT) is None


def test_a_bucket_that_was_not_reduced_is_named() -> None:
    bucket = ["head.norm.weight", "head.norm.bias", "head.vocabulary.weight"]
    local = trained("fp64", "no reduction, own count").gradients[0]
    case = with_gradients(trained("fp64"), 0, lambda name, gradients: (local if name in bucket else gradients)[name])
    sentence = explained(case)
    assert "worst in the gradient of 'head" in sentence
    assert sentence.endswith(
        "; the gradient of 'head.norm.weight', 'head.norm.bias', 'head.vocabulary.weight' (3 of 29 parameters, the "
        "others are right) holds rank 0's share alone: not reduced, divided by rank 0's own token count (30)"
    )


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (lambda total, own: 1 / total, ""),
        (lambda total, own: DATA_DEGREE / total, ", multiplied by the data degree (2)"),
        (lambda total, own: 1 / own, ", divided by its own token count ({}, {})"),
    ],
    ids=["global count", "times data degree", "own count"],
)
def test_shares_that_their_owners_never_summed_are_named(
    step: int, scale: Callable[[int, int], float], text: str
) -> None:
    """Each parameter's owner, another for every second one, holds its own share."""
    shares = partial_gradients(gpt_workload("fp64"), DATA_DEGREE, step, reference("fp64").starting_parameters)
    counts = [sum(share.num_tokens for share in shares if share.data_rank == rank) for rank in range(DATA_DEGREE)]
    names = list(reference("fp64").gradients[step])

    def of_owner(name: str, gradients: Gradients) -> torch.Tensor:
        owner = names.index(name) % DATA_DEGREE
        parts = [share.gradients[name] for share in shares if share.data_rank == owner and name in share.gradients]
        return torch.stack(parts).sum(0) * scale(sum(counts), counts[owner])

    sentence = explained(with_gradients(trained("fp64"), step, of_owner))
    when = ", though step 0's was" if step else ""
    assert sentence.startswith(f"parts at step {step}, ")
    assert sentence.endswith(f"; every gradient is one rank's share alone{text.format(*counts)}: not reduced{when}")


def test_shards_that_were_never_summed_are_named() -> None:
    """The first rank has the first half of every parameter's elements."""
    shares = partial_gradients(gpt_workload("fp64"), DATA_DEGREE, 0, reference("fp64").starting_parameters)
    total = sum(share.num_tokens for share in shares)

    def pieced(name: str, gradients: Gradients) -> torch.Tensor:
        of_ranks = [
            sum(share.gradients[name] for share in shares if share.data_rank == rank) / total for rank in range(2)
        ]
        half = gradients[name].numel() // 2
        flat = torch.cat([of_ranks[0].flatten()[:half], of_ranks[1].flatten()[half:]])
        return flat.view_as(gradients[name])

    assert explained(with_gradients(trained("fp64"), 0, pieced)).endswith(
        "; every gradient is, element by element, one rank's share alone: not reduced"
    )


def test_a_zero_gradient_is_named() -> None:
    case = with_gradients(trained("fp64"), 0, lambda name, g: g[name] * (name != "head.norm.bias"))
    assert explained(case).endswith(
        "the gradient of 'head.norm.bias' (1 of 29 parameters, the others are right) is zero"
    )


def test_a_factor_without_a_known_cause_is_told_as_it_is() -> None:
    case = with_gradients(trained("fp64"), 0, lambda name, g: g[name] * 1.37)
    assert explained(case).endswith(
        "every gradient is 1.37 x the right one: no product of the degrees, micro-batches and counts gives that"
    )


def test_single_elements_are_no_factor_of_one() -> None:
    def one_element(name: str, gradients: Gradients) -> torch.Tensor:
        changed = gradients[name].clone()
        changed.view(-1)[0] += 1e-9 * changed.abs().max()
        return changed

    case = with_gradients(trained("fp64"), 0, one_element)
    assert explained(case).endswith("are right but for single elements")


def test_unlike_factors_are_told_as_a_range() -> None:
    case = with_gradients(trained("fp64"), 0, lambda name, g: g[name] * (3.0 if "norm" in name else 0.7))
    assert "no single factor explains it: the gradients of " in explained(case)
    assert explained(case).endswith("are between 0.7 and 3 x the right ones")


def test_the_tensor_degree_is_a_known_number() -> None:
    case = with_gradients(trained("fp64"), 0, lambda name, g: g[name] * (4.0 if "norm" in name else 1.0))
    assert explained(case, layout=Layout(data=DATA_DEGREE, tensor=4)).endswith(
        "and 6 more (10 of 29 parameters, the others are right) is 4 x the right one: multiplied by the tensor degree "
        "(4)"
    )


def test_a_mean_of_means_is_not_offered_where_counts_are_equal() -> None:
    """Two ranks with 8 valid tokens a sample: half of the right gradient is half, nothing else."""
    workload = replace(gpt_workload(num_micro_batches=1), count=lambda targets: 8 * len(targets), loss=equal_loss)
    truth = train(workload, data_degree=1)
    case = train(workload, FAULTS["double average"])
    sentence = str(explain(case, truth, Tolerance.exact(), workload, LAYOUT))
    assert sentence.endswith("every gradient is 0.5 x the right one: divided once more by the data degree (2)")


def equal_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum()


def test_one_use_of_a_tied_parameter() -> None:
    workload = gpt_workload(tied=True)
    truth = train(workload, data_degree=1)
    ((name, uses),) = gradients_by_use(workload, DATA_DEGREE).items()
    for use, gradient in uses.items():
        case = with_gradients(truth, 0, lambda other, g, gradient=gradient: gradient if other == name else g[other])
        sentence = str(explain(case, truth, Tolerance.exact(), workload, LAYOUT))
        assert sentence.endswith(f"the gradient of the tied parameter {name!r} holds only its use as {use!r}")


def stale(keeps: bool) -> Reduction:
    held: dict[int, Gradients] = {}

    def reduction(shares: object, counts: object, step: int) -> Gradients:
        held[step] = right(shares, counts, step)  # type: ignore[arg-type]
        if step != 1:
            return held[step]
        return {name: held[0][name] + keeps * held[1][name] for name in held[0]}

    return reduction


@pytest.mark.parametrize(
    ("keeps", "cause"),
    [
        (False, "every gradient of step 1 is step 0's: a stale buffer"),
        (True, "every gradient of step 1 holds step 0's too: a buffer was not cleared"),
    ],
)
def test_what_step_1_has_from_step_0(keeps: bool, cause: str) -> None:
    sentence = explained(train(gpt_workload(), stale(keeps)))
    assert sentence.startswith("parts at step 1, worst in ")
    assert sentence.endswith(cause)


def test_a_reduction_that_happens_only_once() -> None:
    once: Reduction = lambda shares, counts, step: (  # noqa: E731
        right if step == 0 else FAULTS["no reduction, own count"]
    )(shares, counts, step)
    sentence = explained(train(gpt_workload(), once))
    assert sentence.startswith("parts at step 1")
    assert "every gradient holds rank 0's share alone: not reduced, divided by rank 0's own token count" in sentence


def test_a_wrong_loss_beside_right_gradients() -> None:
    case = trained("fp64")
    first = gpt_workload().batch(0, data_rank=0, data_degree=DATA_DEGREE)
    model = gpt_workload().build_model()
    own = sum(float(gpt_workload().loss_sum(model, m).detach()) for m in first.micro_batches) / 30
    assert explained(replace(case, losses=[own, *case.losses[1:]])).endswith(
        "the loss holds rank 0's share alone: divided by rank 0's own token count (30)"
    )
    summed = replace(case, losses=[case.losses[0] * 68, *case.losses[1:]])
    assert explained(summed).endswith("the loss is 68 x the right one: never divided by the global token count (68)")
    odd = replace(case, losses=[case.losses[0] * 1.37, *case.losses[1:]])
    assert explained(odd).endswith("which no single factor explains")


def test_undivided_gradients_are_seen_though_the_logged_losses_agree() -> None:
    """One step, so that even the later losses agree."""
    case = trained("fp64", "never divided")
    assert case.losses[0] == pytest.approx(reference("fp64").losses[0], rel=1e-13)
    assert "68 x the right one" in explained(case)


@pytest.mark.parametrize(
    ("ratio", "cause"),
    [
        (2**0.5, "their squares were summed once for each rank of the data axis (2)"),
        (2.0, "their norm is 2 x the right one: multiplied by the data degree (2)"),
        (1.1, "their norm is 1.1 x the right one: no single factor explains it"),
    ],
)
def test_a_wrong_norm_beside_right_gradients(ratio: float, cause: str) -> None:
    case = trained("fp64")
    norms = [ratio * norm for norm in case.gradient_norms if norm is not None]
    assert explained(replace(case, gradient_norms=norms)).endswith(f"the gradients are right, {cause}")


def test_a_norm_taken_after_clipping() -> None:
    workload = gpt_workload(clip_norm=0.1)
    truth = train(workload, data_degree=1)
    case = replace(truth, gradient_norms=[0.1] * 4)
    sentence = str(explain(case, truth, Tolerance.exact(), workload, LAYOUT))
    assert sentence.endswith("their norm was taken after clipping (0.1)")


@pytest.mark.parametrize(
    ("recipe", "slip", "cause"),
    [
        ({}, {"weight_decay": 0.0}, "weight decay (0.1) is missing"),
        ({"clip_norm": 0.1, "optimizer": "sgd"}, {"clip_norm": None}, "gradients are not clipped (0.1)"),
        ({"optimizer": "sgd"}, {"momentum": 0.0}, "momentum (0.9) is missing"),
        ({}, {"learning_rate": 2e-3}, "the learning rate is multiplied by the data degree (2)"),
        ({}, {"learning_rate": 1e-3 / 3}, "the learning rate is divided by the number of micro-batches (3)"),
    ],
)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_slip_in_the_recipe(precision: str, recipe: dict[str, object], slip: dict[str, object], cause: str) -> None:
    workload = gpt_workload(precision, **recipe)
    truth = train(workload, data_degree=1)
    case = replace(train(gpt_workload(precision, **recipe | slip)), learning_rates=truth.learning_rates)
    limits = Tolerance.exact() if precision == "fp64" else Tolerance.from_noise(truth, train(workload))
    sentence = str(explain(case, truth, limits, workload, LAYOUT))
    assert sentence.endswith(f"; the gradients are right, the update is not: {cause}")


def test_weight_decay_on_every_parameter() -> None:
    case = train(replace(gpt_workload(), decays=lambda name, parameter: True))
    assert explained(case).endswith("the update is not: weight decay is applied to every parameter")


def test_parameters_that_never_moved() -> None:
    case, name = trained("fp64"), "head.norm.bias"
    stuck = replace(case, parameters=case.parameters | {name: case.starting_parameters[name]})
    assert explained(stuck).endswith(f"the gradients are right, but {name!r} never moved from the starting weights")


def test_an_update_that_no_recipe_gives() -> None:
    case = trained("fp64")
    start = case.starting_parameters
    moved = {name: start[name] + 1.7 * (value - start[name]) for name, value in case.parameters.items()}
    assert "the update is not: no single change of the recipe explains it" in explained(replace(case, parameters=moved))
    assert explained(replace(case, parameters=moved)).endswith("are between 1.7 and 1.7 x the right ones")


def test_replicas_that_part_beside_right_numbers() -> None:
    case = replace(trained("fp64"), replica_checksums={0: ["a", "b", "c", "d"], 1: ["a", "b", "c", "e"]})
    assert explained(case) == (
        "parts at step 3: rank 1 and rank 0 no longer hold the same bits; losses, gradients and parameters are right"
    )


def test_other_starting_weights_need_no_further_cause() -> None:
    other = train(gpt_workload(seed=5))
    assert explained(other).startswith("parts at step 0, worst in the starting weights of ")
    assert ";" not in explained(other)


def test_a_layout_of_one_rank_has_only_its_micro_batches() -> None:
    workload: Workload = gpt_workload()
    case = train(workload, FAULTS["mean of means over micro-batches"], data_degree=1)
    sentence = str(explain(case, reference("fp64"), Tolerance.exact(), workload, Layout()))
    assert REPORTS["mean of means over micro-batches"] in sentence
    assert max(d.relative for d in differences(case, reference("fp64")) if d.quantity == "gradient") > 0.1
