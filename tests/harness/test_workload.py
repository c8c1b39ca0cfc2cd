import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness import models
from harness.data import IGNORE_INDEX
from harness.datasets import Tensors
from harness.optimizer import RecipeOptimizer
from harness.workload import (
    Batch,
    OptimizerName,
    Training,
    Workload,
    count_targets,
    cross_entropy_sum,
    in_precision,
)

EXAMPLE = Path(__file__).parents[1] / "examples" / "my_workload.py"


def numbered(length: int = 40, num_classes: int = 3, **training: int) -> Workload:
    """Sample i has input [i] and target (1 or 2 valid entries of 3), so that samples can be told apart."""
    inputs = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    targets = torch.arange(length).unsqueeze(1).repeat(1, 3) % num_classes
    targets[:, 2] = IGNORE_INDEX
    targets[::2, 1] = IGNORE_INDEX
    return Workload(
        name="numbered",
        model=lambda: nn.Sequential(nn.Linear(1, 3 * num_classes), nn.Unflatten(1, (3, num_classes))),
        dataset=Tensors(inputs, targets),
        training=Training(**training),
    )


def samples_of(batch: Batch, micro_batch: int) -> list[float]:
    return batch.micro_batches[micro_batch].inputs.flatten().tolist()


def test_none_is_text_where_the_option_lists_it() -> None:
    training = models.load("gpt:size=tiny,learning_rate_scaling=none,clip_norm=none").training
    assert training.learning_rate_scaling == "none"
    assert training.clip_norm is None


def test_batch_is_a_pure_function_of_seed_and_step() -> None:
    workload = numbered(global_batch_size=8, num_micro_batches=2, seed=5)
    first = [samples_of(workload.batch(3), m) for m in range(2)]
    workload.batch(100), workload.batch(0)
    assert [samples_of(workload.batch(3), m) for m in range(2)] == first
    again = numbered(global_batch_size=8, num_micro_batches=2, seed=5)
    assert [samples_of(again.batch(3), m) for m in range(2)] == first
    other_seed = numbered(global_batch_size=8, num_micro_batches=2, seed=6)
    assert [samples_of(other_seed.batch(3), m) for m in range(2)] != first
    assert [samples_of(workload.batch(4), m) for m in range(2)] != first


def test_batch_does_not_touch_the_default_generator() -> None:
    workload = numbered(global_batch_size=8)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    workload.batch(7)
    workload.build_model()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("data_degree", [1, 2, 3, 4])
@pytest.mark.parametrize(("size", "num_micro_batches"), [(8, 1), (8, 2), (5, 2), (7, 3), (4, 4)])
def test_union_of_ranks_is_the_whole_batch_in_order(size: int, num_micro_batches: int, data_degree: int) -> None:
    workload = numbered(global_batch_size=size, num_micro_batches=num_micro_batches)
    for step in range(3):
        whole = workload.batch(step)
        shares = [workload.batch(step, data_rank=rank, data_degree=data_degree) for rank in range(data_degree)]
        for micro_batch in range(num_micro_batches):
            joined = [
                value
                for share in shares
                if share.micro_batches[micro_batch].num_tokens
                for value in samples_of(share, micro_batch)
            ]
            assert joined == samples_of(whole, micro_batch)
        assert {share.global_num_tokens for share in shares} == {whole.global_num_tokens}
        local = sum(micro_batch.num_tokens for share in shares for micro_batch in share.micro_batches)
        assert local == whole.global_num_tokens == workload.global_num_tokens(step)


def test_shares_differ_by_one_sample_at_most() -> None:
    workload = numbered(global_batch_size=10, num_micro_batches=1)
    sizes = [len(samples_of(workload.batch(0, data_rank=rank, data_degree=4), 0)) for rank in range(4)]
    assert sorted(sizes) == [2, 2, 3, 3]


def test_epochs_of_a_batch_stream_visit_every_sample_once() -> None:
    workload = numbered(length=20, global_batch_size=4)
    epochs = [[x for step in range(5 * e, 5 * e + 5) for x in samples_of(workload.batch(step), 0)] for e in range(2)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_rank_without_a_sample_borrows_one_at_weight_zero() -> None:
    workload = numbered(global_batch_size=2)
    shares = [workload.batch(0, data_rank=rank, data_degree=4) for rank in range(4)]
    empty = [share for share in shares if share.micro_batches[0].num_tokens == 0]
    assert len(empty) == 2
    model = workload.build_model()
    for share in empty:
        assert len(share.micro_batches[0].inputs) == 1
        loss = workload.loss_sum(model, share.micro_batches[0])
        loss.backward()
        assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_seeds_of_micro_batches_differ_by_rank_step_and_index() -> None:
    workload = numbered(global_batch_size=8, num_micro_batches=2)
    seeds = [
        micro_batch.seed
        for step in range(3)
        for rank in range(4)
        for micro_batch in workload.batch(step, data_rank=rank, data_degree=4).micro_batches
    ]
    assert len(set(seeds)) == 24


def test_loss_is_a_sum_over_a_count_and_no_mean_of_means() -> None:
    """Part means 2.0 over 10 tokens and 4.0 over 90 give 3.8; their mean would be 3.0."""
    # With logits (z, 0) and target 0 the cross-entropy is log(1 + exp(-z)): z = -log(exp(loss) - 1).
    targets = torch.zeros(2, 90, dtype=torch.int64)
    targets[0, 10:] = IGNORE_INDEX
    logits = torch.zeros(2, 90, 2, dtype=torch.float64)
    for row, loss in enumerate((2.0, 4.0)):
        logits[row, :, 0] = -math.log(math.exp(loss) - 1.0)
    workload = Workload(
        name="two parts",
        model=nn.Identity,
        dataset=Tensors(logits, targets),
        training=Training(global_batch_size=2, num_micro_batches=2),
    )
    workload = in_precision(workload, "fp64")
    sums = {}
    for rank in range(2):
        batch = workload.batch(0, data_rank=rank, data_degree=2)
        assert batch.global_num_tokens == 100
        for micro_batch in batch.micro_batches:
            if micro_batch.num_tokens:
                sums[micro_batch.num_tokens] = workload.loss_sum(nn.Identity(), micro_batch).item()
    assert {count: total / count for count, total in sums.items()} == pytest.approx({10: 2.0, 90: 4.0}, rel=1e-12)
    assert sum(sums.values()) / 100 == pytest.approx(3.8, rel=1e-12)


def test_counts() -> None:
    assert count_targets(torch.tensor([[1, IGNORE_INDEX], [IGNORE_INDEX, IGNORE_INDEX]])) == 1
    assert count_targets(torch.zeros(5, 3)) == 5


def test_cross_entropy_of_low_precision_is_summed_in_fp32() -> None:
    logits = torch.zeros(3, 4, 7, dtype=torch.bfloat16)
    targets = torch.zeros(3, 4, dtype=torch.int64)
    targets[0, 0] = IGNORE_INDEX
    loss = cross_entropy_sum(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(11 * math.log(7), rel=1e-6)
    assert cross_entropy_sum(logits, torch.full_like(targets, IGNORE_INDEX)).item() == 0.0


def test_model_starts_from_the_seed_or_from_the_weights_given(tmp_path: Path) -> None:
    workload = numbered(seed=1)
    first, second = workload.build_model().state_dict(), workload.build_model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = replace(workload, training=replace(workload.training, seed=2)).build_model().state_dict()
    assert not torch.equal(first["0.weight"], other["0.weight"])
    torch.save(other, tmp_path / "weights.pt")
    loaded = in_precision(workload, "fp64", tmp_path / "weights.pt").build_model().state_dict()
    assert all(torch.equal(loaded[name], other[name].double()) for name in other)


def test_precision_casts_weights_and_floating_inputs_but_no_indices() -> None:
    for precision, dtype in (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        workload = in_precision(numbered(), precision)
        micro_batch = workload.batch(0).micro_batches[0]
        assert {p.dtype for p in workload.build_model().parameters()} == {dtype}
        assert micro_batch.inputs.dtype == dtype and micro_batch.targets.dtype == torch.int64
    with pytest.raises(ValueError, match="precision must be one of fp64, fp32, bf16, bf16_fp32_gradients, got 'fp8'"):
        in_precision(numbered(), "fp8")


class Columns(nn.Module):
    """Parameters cut out of one matrix: the elements of each lie between those of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(part) for part in torch.arange(24.0).view(4, 6).chunk(2, dim=1))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_parameters_with_gaps_between_their_elements_are_stepped_rightly(optimizer: OptimizerName) -> None:
    training = Training(optimizer=optimizer, learning_rate=0.125, weight_decay=0.0, epsilon=0.0)
    workload = Workload(name="columns", model=Columns, dataset=numbered().dataset, training=training)
    model, before = workload.build_model(), Columns()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    RecipeOptimizer(model, workload).step(tracks_norm=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name) - 0.125), name


class SharedColumns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        both = torch.arange(24.0).view(4, 6)
        self.left, self.right = nn.Parameter(both[:, :3]), nn.Parameter(both[:, 2:5])


class MirroredColumn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.column = nn.Parameter(torch.zeros(4, 6)[:, :3])
        self.mirror = self.column.detach().t()


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize(
    ("model", "names"), [(SharedColumns, ("left", "right")), (MirroredColumn, ("column", "mirror"))]
)
def test_parameters_with_gaps_that_are_not_alone_are_refused(
    model: type[nn.Module], names: tuple[str, str], precision: str
) -> None:
    workload = in_precision(replace(numbered(), model=model), precision)
    with pytest.raises(ValueError, match=f"parameter {names[0]} has gaps .* shares some of them with {names[1]}: "):
        workload.build_model()


def test_activation_checkpointing_recomputes_and_changes_nothing() -> None:
    calls = []

    class Noted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return torch.tanh(super().forward(x))

    gradients = []
    for activation_checkpointing in (False, True):
        workload = replace(
            numbered(),
            model=lambda: nn.Sequential(Noted(1, 9), nn.Unflatten(1, (3, 3))),
            training=Training(activation_checkpointing=activation_checkpointing),
        )
        model = workload.build_model()
        workload.loss_sum(model, workload.batch(0).micro_batches[0]).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert calls == [8, 8, 8]
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_learning_rate_warms_up_then_falls() -> None:
    cosine = Training(learning_rate=1.0, schedule="cosine", warmup_steps=4, total_steps=12)
    rates = [cosine.learning_rate_at(update) for update in (0, 1, 3, 4, 8, 12, 50)]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
    linear = Training(learning_rate=2.0, schedule="linear", total_steps=10, final_learning_rate_ratio=0.0)
    assert [linear.learning_rate_at(update) for update in (0, 5, 10)] == pytest.approx([2.0, 1.0, 0.0])
    constant = Training(learning_rate=3.0, warmup_steps=2)
    assert [constant.learning_rate_at(update) for update in (0, 1, 2, 9)] == [1.5, 3.0, 3.0, 3.0]


def test_learning_rate_scales_with_the_global_batch() -> None:
    recipe = Training(global_batch_size=32, base_global_batch_size=8, learning_rate=0.1)
    expected = {"none": 0.1, "linear": 0.4, "sqrt": 0.2}
    for scaling, rate in expected.items():
        assert replace(recipe, learning_rate_scaling=scaling).learning_rate_at(0) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be an integer of at least 1, got 0"),
        ({"global_batch_size": 2.0}, "global_batch_size must be an integer of at least 1, got 2.0"),
        ({"global_batch_size": True}, "global_batch_size must be an integer of at least 1, got true"),
        ({"num_micro_batches": 9}, "got 9 micro-batches for a global batch of 8"),
        ({"optimizer": "lion"}, "optimizer must be one of adamw, sgd, got 'lion'"),
        ({"schedule": "step"}, "schedule must be one of constant, linear, cosine, got 'step'"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number of at least 0, got nan"),
        ({"learning_rate": "fast"}, "learning_rate must be a finite number of at least 0, got 'fast'"),
        ({"learning_rate": True}, "learning_rate must be a finite number of at least 0, got true"),
        (
            {"final_learning_rate_ratio": -0.1},
            "final_learning_rate_ratio must be a finite number of at least 0, got -0.1",
        ),
        ({"beta1": 1.0}, "beta1 must be a number of at least 0 and below 1, got 1.0"),
        ({"beta2": "high"}, "beta2 must be a number of at least 0 and below 1, got 'high'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"skip_nonfinite": "no"}, "skip_nonfinite must be true or false, got 'no'"),
        ({"activation_checkpointing": 1}, "activation_checkpointing must be true or false, got 1"),
        ({"base_global_batch_size": 0}, "base_global_batch_size must be an integer of at least 1, or none, got 0"),
        ({"clip_norm": 0.0}, "clip_norm must be a number above 0, or none, got 0.0"),
        ({"clip_norm": "1"}, "clip_norm must be a number above 0, or none, got '1'"),
        ({"clip_norm": True}, "clip_norm must be a number above 0, or none, got true"),
        ({"learning_rate_scaling": "linear"}, "learning_rate_scaling=linear needs base_global_batch_size, got none"),
    ],
)
def test_bad_recipes_say_what_was_expected(options: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        Training(**options)  # type: ignore[arg-type]
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_batch_statistics_need_a_sample_on_every_rank() -> None:
    workload = replace(numbered(global_batch_size=8, num_micro_batches=4), depends_on_chunks=True)
    assert workload.fits_data_degree(2) is None
    reason = workload.fits_data_degree(3)
    assert reason is not None and "a micro-batch of 2 samples cannot be shared by 3 data ranks" in reason
    assert numbered(global_batch_size=8, num_micro_batches=4).fits_data_degree(3) is None


def test_options_written_as_text_reach_the_builder_and_the_recipe() -> None:
    workload = models.load("gpt:size=tiny,tied=true,global_batch_size=4,learning_rate=3e-4,clip_norm=1,optimizer=sgd")
    assert workload.name == "gpt:size=tiny,tied=true,global_batch_size=4,learning_rate=3e-4,clip_norm=1,optimizer=sgd"
    assert workload.training == Training(global_batch_size=4, learning_rate=3e-4, clip_norm=1, optimizer="sgd")
    model = workload.build_model()
    assert model.get_parameter("embedding.token.weight") is model.get_parameter("head.vocabulary.weight")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bert", "expected one of awkward, convnet, gpt, llama, or path/to/file.py:builder"),
        ("gpt:size", "expected options as key=value, got 'size'"),
        (
            "gpt:depth=3",
            "unknown option depth; gpt takes attention_dropout, dropout, sequence_length, size",
        ),
        ("gpt:size=huge", "size must be one of tiny, 0.9m, 17m"),
        ("gpt:tied=maybe", "tied must be true or false, got 'maybe'"),
        ("gpt:dropout=1", "dropout must be a number in [0, 1), got 1"),
        ("gpt:sequence_length=0", "sequence_length must be an integer of at least 1, got 0"),
        ("gpt:vocabulary_size=64", "tokens must be below the vocabulary size 64, got "),
        ("gpt:text=none", "text must be stdlib or an existing file, got 'None'"),
        ("gpt:global_batch_size=many", "global_batch_size must be an integer of at least 1, got 'many'"),
        ("convnet:width=-1", "width must be an integer of at least 1, got -1"),
        ("convnet:batch_norm=group", "batch_norm must be one of local, synchronised, got 'group'"),
        ("awkward:kind=easy", "kind must be one of unequal_tokens, "),
        ("no/such/file.py:builder", "expected an existing Python file before the colon, got 'no/such/file.py'"),
        (f"{EXAMPLE}:cosine", "my_workload.py has no 'cosine'"),
        (f"{EXAMPLE}:sine:depth=2", "unknown option depth; sine takes width"),
        (f"{EXAMPLE}:torch", "torch must be a function, got module"),
    ],
)
def test_bad_workload_texts_give_one_clear_line(text: str, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        models.load(text)
    assert text.split(":", maxsplit=1)[0] in str(caught.value)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_users_own_file_is_a_workload() -> None:
    text = f"{EXAMPLE}:sine:width=8,num_micro_batches=2,seed=3"
    workload = models.load(text)
    assert workload.name == text
    assert workload.training == Training(global_batch_size=16, learning_rate=1e-2, num_micro_batches=2, seed=3)
    assert workload.global_num_tokens(0) == 16
    model = workload.build_model()
    assert model.get_parameter("0.weight").shape == (8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(100):
        batch = workload.batch(step)
        loss = sum(workload.loss_sum(model, m) for m in batch.micro_batches) / batch.global_num_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_batch_norm_is_not_recomputed() -> None:
    with pytest.raises(ValueError, match="running statistics twice"):
        models.load("convnet:activation_checkpointing=true").build_model()
