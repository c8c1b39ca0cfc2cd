from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from harness import models
from harness.models import awkward
from harness.parameters import LogicalParameter, logical_parameters
from harness.workload import Batch, Workload, in_precision

# What these leave open between ranks is an implementation's business: it replays chunks, or joins statistics.
ON_THE_WHOLE_BATCH_ONLY = {"batch_norm", "synchronised_batch_norm", "dropout"}


def load(kind: str, precision: str = "fp64") -> Workload:
    return in_precision(models.load(f"awkward:kind={kind}"), precision)


def gradients(workload: Workload, data_degree: int, step: int) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients of one step by plain torch: a fresh module for each data rank, gradients summed."""
    total, summed = 0.0, dict[str, Tensor | None]()
    for rank in range(data_degree):
        model = workload.build_model()
        batch = workload.batch(step, data_rank=rank, data_degree=data_degree)
        for micro_batch in batch.micro_batches:
            loss = workload.loss_sum(model, micro_batch)
            (loss / batch.global_num_tokens).backward()
            total += loss.item()
        for name, parameter in model.named_parameters():
            if summed.get(name) is None:
                summed[name] = parameter.grad
            elif parameter.grad is not None:
                summed[name] = summed[name] + parameter.grad
    return total / batch.global_num_tokens, summed


def parameters_of(kind: str) -> dict[str, LogicalParameter]:
    workload = load(kind)
    return {p.name: p for p in logical_parameters(workload.build_model(), workload.decays)}


def users_of(kind: str, name: str, step: int, data_degree: int = 2) -> list[tuple[int, int]]:
    """(rank, micro-batch) pairs whose backward reaches the parameter."""
    workload, found = load(kind), []
    for rank in range(data_degree):
        batch = workload.batch(step, data_rank=rank, data_degree=data_degree)
        for index, micro_batch in enumerate(batch.micro_batches):
            model = workload.build_model()
            workload.loss_sum(model, micro_batch).backward()
            if model.get_parameter(name).grad is not None:
                found.append((rank, index))
    return found


def counts_of(batch: Batch) -> list[int]:
    return [micro_batch.num_tokens for micro_batch in batch.micro_batches]


def test_every_kind_says_what_it_is_for() -> None:
    assert len(set(awkward.KINDS)) == len(awkward.KINDS) == 27
    for kind in awkward.KINDS:
        assert len(awkward.description(kind)) > 40 and awkward.description(kind).endswith(".")


@pytest.mark.parametrize("kind", awkward.KINDS)
def test_loss_is_finite_and_a_step_trains_what_is_trainable(kind: str) -> None:
    workload = load(kind)
    loss, grads = gradients(workload, data_degree=1, step=0)
    assert 0.0 < loss < 10.0
    trained = [p for p in workload.build_model().parameters() if p.requires_grad]
    missing = {"unused": 2}.get(kind, 0)
    assert sum(grad is not None for grad in grads.values()) == len(trained) - missing
    assert all(torch.isfinite(grad).all() for grad in grads.values() if grad is not None)
    assert sum(grad is not None and bool(grad.any()) for grad in grads.values()) >= 3


@pytest.mark.parametrize("kind", [kind for kind in awkward.KINDS if kind not in ON_THE_WHOLE_BATCH_ONLY])
def test_shares_add_up_to_the_whole(kind: str, data_degree: int = 4) -> None:
    workload = load(kind)
    tolerance = 0.1 if workload.fixed_dtypes else 1e-12
    for step in (0, 2):
        whole_loss, whole = gradients(workload, data_degree=1, step=step)
        loss, parts = gradients(workload, data_degree=data_degree, step=step)
        assert loss == pytest.approx(whole_loss, rel=tolerance)
        for name, expected in whole.items():
            actual = parts[name]
            assert (actual is None) == (expected is None), name
            if actual is not None and expected is not None and expected.numel():
                assert (actual - expected).abs().max() <= tolerance * expected.abs().max(), name


def test_dropout_masks_differ_between_ranks_and_chunks_are_replayable() -> None:
    workload = load("dropout")
    assert workload.uses_random_numbers and workload.depends_on_chunks
    first, second = (gradients(workload, data_degree=2, step=0)[0] for _ in range(2))
    assert first == second != gradients(workload, data_degree=1, step=0)[0]


def test_token_counts_are_very_unequal() -> None:
    counts = [counts_of(load("unequal_tokens").batch(0, data_rank=rank, data_degree=2)) for rank in range(2)]
    assert counts == [[9, 9], [9, 4]]


def test_uneven_samples_leave_a_rank_without_any() -> None:
    workload = load("uneven_samples")
    assert [counts_of(workload.batch(0, data_rank=rank, data_degree=2)) for rank in range(2)] == [[8, 8], [8, 16]]
    assert [0 in counts_of(workload.batch(0, data_rank=rank, data_degree=3)) for rank in range(3)].count(True) == 1


def test_a_whole_micro_batch_is_padding() -> None:
    workload = load("padding_micro_batch")
    assert [counts_of(workload.batch(step)) for step in range(4)] == [[32, 0], [0, 32], [32, 0], [0, 32]]


def test_names_shapes_and_flags_are_as_awkward_as_promised() -> None:
    assert parameters_of("tied")["embedding.token.weight"].aliases == ("head.vocabulary.weight",)
    assert parameters_of("alias")["0.weight"].aliases == ("2.weight", "4.uncalled")
    assert parameters_of("vocabulary")["head.vocabulary.weight"].shape[0] == 51
    assert parameters_of("gqa")["block0.attention.key.weight"].shape == (8, 16)
    assert parameters_of("gqa")["block0.attention.query.weight"].shape == (16, 16)
    odd = parameters_of("odd_shapes").values()
    assert {1, 7, 13, 57, 0} <= {p.num_elements for p in odd}
    assert {(), (1,), (0, 13)} <= {p.shape for p in odd}
    assert {name for name, p in parameters_of("frozen").items() if not p.trainable} == {
        "embedding.token.weight",
        "embedding.position.weight",
        "block0.perceptron_norm.weight",
        "block0.perceptron_norm.bias",
        "block0.perceptron.expansion.weight",
        "block0.perceptron.expansion.bias",
        "block0.perceptron.projection.weight",
        "block0.perceptron.projection.bias",
    }


def test_biases_and_gains_are_far_from_where_they_hide() -> None:
    for name, parameter in load("biases").build_model().named_parameters():
        if parameter.ndim == 1:
            neutral = 1.0 if name.endswith("norm.weight") else 0.0
            assert (parameter - neutral).abs().mean() > 0.2, name


def test_decay_follows_the_name_and_not_the_shape() -> None:
    parameters = parameters_of("decay_groups")
    assert parameters["block1.perceptron.expansion.bias"].decayed
    assert parameters["block1.perceptron.expansion.weight"].decayed
    assert not parameters["block1.attention.projection.weight"].decayed


def test_layouts_survive_building_in_another_precision() -> None:
    model = load("non_contiguous").build_model()
    assert model.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
    assert not model.get_parameter("0.weight").is_contiguous()
    assert model.get_parameter("4.weight").stride() == (1, 5)


def test_dtypes_stay_mixed_in_every_precision() -> None:
    for precision in ("fp64", "fp32", "bf16"):
        dtypes = [p.dtype for p in load("mixed_dtypes", precision).build_model().parameters()]
        assert set(dtypes) == {torch.float32, torch.bfloat16, torch.float64}
    assert load("mixed_dtypes").batch(0).micro_batches[0].inputs.dtype == torch.float32


def test_unused_parameters_have_no_gradient() -> None:
    _, grads = gradients(load("unused"), data_degree=1, step=0)
    assert {name for name, grad in grads.items() if grad is None} == {"0.unused.weight", "0.unused.bias"}


def test_branch_is_used_by_some_ranks_and_micro_batches() -> None:
    used = [users_of("rank_dependent", "0.branch.weight", step) for step in range(4)]
    assert used == [[(0, 0)], [(1, 1)], [(0, 0), (1, 1)], [(0, 1), (1, 0)]]
    used = [users_of("sometimes_unused", "0.branch.weight", step) for step in range(4)]
    assert used == [[(0, 0), (1, 1)], [], [(0, 1)], [(1, 0)]]


def test_layer_is_called_as_often_as_the_batch_asks() -> None:
    workload = load("reused")
    model, calls = workload.build_model(), []
    model.get_submodule("0.layer").register_forward_hook(lambda *_: calls.append(1))
    per_micro_batch = []
    for step in range(3):
        for micro_batch in workload.batch(step).micro_batches:
            calls.clear()
            workload.loss_sum(model, micro_batch)
            per_micro_batch.append(len(calls))
    assert per_micro_batch == [3, 2, 2, 3, 2, 2]


def test_batch_norm_kinds_give_every_rank_a_sample_up_to_five() -> None:
    for kind in ("batch_norm", "synchronised_batch_norm"):
        workload = load(kind)
        assert workload.fits_data_degree(4) is None and workload.fits_data_degree(6) is not None
        sizes = [len(workload.batch(0, data_rank=r, data_degree=2).micro_batches[0].inputs) for r in range(2)]
        assert sizes == [2, 3]
        norms = [m for m in workload.build_model().modules() if isinstance(m, nn.BatchNorm2d)]
        assert len(norms) == 3 and all(norm.bias.abs().min() > 0 for norm in norms)


def test_buffers_follow_the_forwards() -> None:
    workload = load("buffers")
    model = workload.build_model()
    losses = [workload.loss_sum(model, m) for step in range(2) for m in workload.batch(step).micro_batches]
    sum(losses).backward()  # all forwards before any backward, as in a pipeline
    buffers = dict(model.named_buffers())
    assert buffers["1.num_calls"].item() == 4 and buffers["1.num_calls"].dtype == torch.int64
    assert buffers["1.gain"].dtype == torch.float64
    torch.testing.assert_close(buffers["1.gain"], torch.full((8,), 0.9**4, dtype=torch.float64))
    assert "1.offset" in buffers and "1.offset" not in model.state_dict()


def test_clipping_is_active_at_every_step() -> None:
    workload = load("clipped")
    assert workload.training.clip_norm is not None and workload.training.optimizer == "sgd"
    for step in range(4):
        _, grads = gradients(workload, data_degree=1, step=step)
        norm = torch.stack([grad.norm() for grad in grads.values() if grad is not None]).norm()
        assert norm > 3 * workload.training.clip_norm


def test_schedule_reaches_warm_up_and_decay_within_a_few_steps() -> None:
    rates = [load("schedule").training.learning_rate_at(update) for update in range(4)]
    assert rates[:3] == pytest.approx([0.05, 0.1, 0.1])
    assert rates[3] < 0.09


def test_checkpointed_gradients_are_bit_equal() -> None:
    workload = load("checkpointed")
    plain = replace(workload, training=replace(workload.training, activation_checkpointing=False))
    _, recomputed = gradients(workload, data_degree=1, step=0)
    _, kept = gradients(plain, data_degree=1, step=0)
    assert all(torch.equal(recomputed[name], kept[name]) for name in kept)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_only_one_rank_sees_the_gradient_that_is_not_finite(precision: str) -> None:
    workload = load("nonfinite", precision)
    seen = []
    for step in range(4):
        for rank in range(4):
            model = workload.build_model()
            for micro_batch in workload.batch(step, data_rank=rank, data_degree=4).micro_batches:
                loss = workload.loss_sum(model, micro_batch)
                assert torch.isfinite(loss)
                loss.backward()
            if not all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None):
                seen.append((step, rank))
    assert workload.training.skip_nonfinite and seen == [(1, 3)]


def test_training_options_still_apply() -> None:
    workload = models.load("awkward:kind=dropout,activation_checkpointing=true,num_micro_batches=4")
    assert workload.training.activation_checkpointing and workload.training.num_micro_batches == 4
    assert workload.training.global_batch_size == 8
