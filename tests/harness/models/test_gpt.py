import math

import pytest
import torch
from torch import nn

from harness import models
from harness.models import gpt
from harness.parameters import logical_parameters
from harness.workload import Workload, in_precision


def first_loss(workload: Workload) -> float:
    batch = workload.batch(0)
    model = workload.build_model()
    return sum(workload.loss_sum(model, m).item() for m in batch.micro_batches) / batch.global_num_tokens


def num_parameters(size: str) -> int:
    with torch.device("meta"):
        model = gpt.decoder(gpt.SIZES[size])
    return sum(parameter.num_elements for parameter in logical_parameters(model))


def test_benchmark_size_is_exactly_this() -> None:
    assert gpt.SIZES["17m"] == gpt.Shape(
        num_layers=6, width=384, num_heads=6, vocabulary_size=8192, sequence_length=128
    )
    # Two vocabularies, positions, 12 w^2 + 13 w a block, the last norm.
    assert num_parameters("17m") == 2 * 8192 * 384 + 128 * 384 + 6 * (12 * 384**2 + 13 * 384) + 2 * 384 == 16_988_160


@pytest.mark.parametrize(
    ("size", "billions"),
    [
        ("0.9m", 0.0009),
        ("30m", 0.030),
        ("small", 0.125),
        ("medium", 0.350),
        ("large", 0.760),
        ("xl", 1.3),
        ("2.7b", 2.7),
        ("6.7b", 6.7),
        ("13b", 13.0),
        ("175b", 175.0),
    ],
)
def test_sizes_are_what_they_are_called(size: str, billions: float) -> None:
    """Published counts take the vocabulary once, and are rounded."""
    shape = gpt.SIZES[size]
    untied = shape.vocabulary_size * shape.width if size in ("0.9m", "30m") else 0
    assert (shape.num_matrix_parameters + untied) / 1e9 == pytest.approx(billions, rel=0.04)


def test_largest_size_can_be_planned_without_memory() -> None:
    # The matrices, the vocabulary once more, positions, 13 w a block for biases and norms, the last norm.
    w = 12288
    expected = gpt.SIZES["175b"].num_matrix_parameters + 50257 * w + 2048 * w + 96 * 13 * w + 2 * w
    assert num_parameters("175b") == expected


def test_first_loss_is_that_of_a_guess() -> None:
    assert first_loss(models.load("gpt")) == pytest.approx(math.log(256), rel=0.1)


def test_tied_vocabulary_is_one_parameter() -> None:
    tied, untied = (logical_parameters(models.load(f"gpt:tied={value}").build_model()) for value in ("true", "false"))
    (vocabulary,) = (p for p in tied if p.aliases)
    assert (vocabulary.name, vocabulary.aliases) == ("embedding.token.weight", ("head.vocabulary.weight",))
    assert sum(p.num_elements for p in untied) - sum(p.num_elements for p in tied) == 256 * 32
    assert not any(p.aliases for p in untied)


def test_model_is_a_chain_of_blocks_and_no_bias_is_zero() -> None:
    model = models.load("gpt").build_model()
    assert isinstance(model, nn.Sequential)
    assert [name for name, _ in model.named_children()] == ["embedding", "block0", "block1", "head"]
    assert all(p.abs().min() > 0 for name, p in model.named_parameters() if name.endswith("bias"))


def test_attention_looks_back_only() -> None:
    model = in_precision(models.load("gpt"), "fp64").build_model()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert not difference[:9].any()
    assert (difference[9:] > 1e-6).all()


def test_flops_follow_the_stated_formula() -> None:
    # Weights a token meets: 2 layers of 12 * 32^2 and a vocabulary of 256 * 32; attention 12 * 2 * 32 * 16.
    assert models.load("gpt").flops_per_unit == 6 * (2 * 12 * 32**2 + 256 * 32) + 12 * 2 * 32 * 16


def test_overrides_change_the_model_and_the_samples() -> None:
    workload = models.load("gpt:sequence_length=24,vocabulary_size=300")
    model = workload.build_model()
    assert model.get_parameter("embedding.token.weight").shape == (300, 32)
    assert model.get_parameter("embedding.position.weight").shape == (24, 32)
    assert workload.batch(0).micro_batches[0].inputs.shape == (8, 24)


def test_dropout_draws_from_the_seed_of_the_micro_batch() -> None:
    workload = in_precision(models.load("gpt:dropout=0.3"), "fp64")
    assert workload.uses_random_numbers and workload.depends_on_chunks
    plain = models.load("gpt")
    assert not plain.uses_random_numbers and not plain.depends_on_chunks
    model = workload.build_model()
    first, second = (workload.batch(step).micro_batches[0] for step in (0, 1))
    assert workload.loss_sum(model, first).item() == workload.loss_sum(model, first).item()
    assert workload.loss_sum(model, first).item() != workload.loss_sum(model.eval(), first).item()
    assert first.seed != second.seed
