from itertools import pairwise

import pytest
import torch
from toy_training import DATA_DEGREE, NUM_MICRO_BATCHES, NUM_STEPS, gpt_workload, reference

from harness import models
from harness.shares import gradients_by_use, partial_gradients, retrained, total_gradients
from harness.workload import in_precision


def test_shares_carry_the_counts_of_their_chunks() -> None:
    shares = partial_gradients(gpt_workload(), DATA_DEGREE)
    counts = {(share.data_rank, share.micro_batch): share.num_tokens for share in shares}
    assert counts == {(0, 0): 6, (0, 1): 10, (0, 2): 14, (1, 0): 10, (1, 1): 12, (1, 2): 16}
    assert [share.num_samples for share in shares] == [2] * DATA_DEGREE * NUM_MICRO_BATCHES
    assert sum(share.num_targets for share in shares) == 12 * 8


@pytest.mark.parametrize("step", [0, 1])
def test_their_sum_over_the_global_count_is_the_reference(step: int) -> None:
    shares = partial_gradients(gpt_workload(), DATA_DEGREE, step, reference("fp64").starting_parameters)
    count = sum(share.num_tokens for share in shares)
    for name, gradient in total_gradients(shares).items():
        torch.testing.assert_close(gradient / count, reference("fp64").gradients[step][name], rtol=1e-12, atol=1e-15)
    assert sum(share.loss_sum for share in shares) / count == pytest.approx(reference("fp64").losses[step], rel=1e-13)


def test_retraining_the_recipe_gives_the_references_parameters() -> None:
    parameters = retrained(gpt_workload(), DATA_DEGREE, NUM_STEPS, reference("fp64").starting_parameters)
    for name in ("embedding.token.weight", "block1.perceptron.expansion.bias", "head.norm.weight"):
        torch.testing.assert_close(parameters[name], reference("fp64").parameters[name], rtol=1e-12, atol=1e-14)


def test_synchronised_batch_statistics_are_those_of_all_ranks() -> None:
    workload = in_precision(models.load("awkward:kind=synchronised_batch_norm"), "fp64")
    whole, parts = (total_gradients(partial_gradients(workload, degree)) for degree in (1, 2))
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-10, atol=1e-13)


def test_local_batch_statistics_are_each_ranks_own() -> None:
    workload = in_precision(models.load("awkward:kind=batch_norm"), "fp64")
    whole, parts = (total_gradients(partial_gradients(workload, degree)) for degree in (1, 2))
    assert any(not torch.allclose(parts[name], gradient) for name, gradient in whole.items())


def test_dropout_is_that_of_the_rank_and_leaves_the_random_state_alone() -> None:
    workload = in_precision(models.load("awkward:kind=dropout"), "fp64")
    before = torch.get_rng_state()
    first, again = (total_gradients(partial_gradients(workload, 2)) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_share_without_tokens_weighs_nothing() -> None:
    workload = in_precision(models.load("awkward:kind=padding_micro_batch"), "fp64")
    empty = [share for share in partial_gradients(workload, 2) if share.micro_batch == 1]
    assert [(share.num_tokens, share.num_targets, share.loss_sum) for share in empty] == [(0, 0, 0.0)] * 2


def test_the_uses_of_a_tied_parameter_add_up_to_its_gradient() -> None:
    workload = gpt_workload(tied=True)
    uses = gradients_by_use(workload, DATA_DEGREE)
    (name,) = uses
    embedding, head = uses[name].values()
    shares = partial_gradients(workload, DATA_DEGREE)
    whole = total_gradients(shares)[name] / sum(share.num_tokens for share in shares)
    torch.testing.assert_close(embedding + head, whole, rtol=1e-12, atol=1e-15)
    assert all(not torch.allclose(one, other) for one, other in pairwise((embedding, head, whole)))
    assert gradients_by_use(gpt_workload(), DATA_DEGREE) == {}
