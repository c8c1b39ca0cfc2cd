import pytest
import torch

from harness.hypotheses import factors, mixtures, name_factor
from harness.layout import Layout
from harness.shares import Share


def share(data_rank: int, micro_batch: int, num_tokens: int, loss_sum: float = 0.0, gradient: float = 0.0) -> Share:
    return Share(
        data_rank=data_rank,
        micro_batch=micro_batch,
        num_tokens=num_tokens,
        num_targets=128,
        num_samples=4,
        loss_sum=loss_sum,
        gradients={"w": torch.tensor([gradient])},
    )


def by_text(shares: list[Share]) -> dict[str, float]:
    return {mixture.text: mixture.loss(shares) for mixture in mixtures(shares)}


def test_accumulating_means_of_unequal_parts() -> None:
    """Parts of mean 2.0 over 10 tokens and 4.0 over 90: 3.8, and a mean of means of 3.0."""
    losses = by_text([share(0, 0, 10, 20.0), share(0, 1, 90, 360.0)])
    assert losses[""] == pytest.approx(3.8)
    assert losses["is a mean of means over the micro-batches"] == pytest.approx(3.0)


def test_averaging_ranks_of_unequal_counts() -> None:
    """The right weights of the ranks' per-token means are 0.1 and 0.9, not 0.5 and 0.5."""
    shares = [share(0, 0, 10, gradient=10 * 1.0), share(1, 0, 90, gradient=90 * 100.0)]
    mixed = {mixture.text: float(mixture.gradients(shares, ["w"])["w"]) for mixture in mixtures(shares)}
    assert mixed[""] == pytest.approx(0.1 * 1 + 0.9 * 100)
    assert mixed["is a mean of means over the data ranks"] == pytest.approx(0.5 * 1 + 0.5 * 100)


def test_what_equals_another_is_not_offered() -> None:
    equal = [share(rank, index, 7) for rank in range(2) for index in range(2)]
    assert not [text for text in by_text(equal) if "mean of means over the" in text or "over data ranks" in text]
    assert list(by_text([share(0, 0, 7)])) == [""]
    # Equal over micro-batches, unequal over ranks.
    offered = by_text([share(0, 0, 2), share(0, 1, 2), share(1, 0, 8), share(1, 1, 8)])
    assert "is a mean of means over the data ranks" in offered
    assert "is a mean of means over the micro-batches" not in offered
    # All tokens on rank 0: its share alone is the right sum.
    assert list(by_text([share(0, 0, 7), share(1, 0, 0)])) == [""]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (0.5, ["divided once more by the data degree (2)"]),
        (3, ["multiplied by the number of micro-batches (3)"]),
        (1 / 6, ["divided once more by the number of micro-batches (3) and divided once more by the data degree (2)"]),
        (37, ["never divided by the global token count (37)"]),
        (37 / 2, ["never divided by the global token count (37) and divided once more by the data degree (2)"]),
        (37 / 768, ["divided by all 768 targets, ignored ones too"]),
        (37 / 24, ["divided by the number of samples (24)"]),
        (1 / 37, ["divided twice by the global token count (37)"]),
        (5, ["multiplied by the tensor degree (5)"]),
        (1 / 7, ["divided once more by the pipeline degree (7)"]),
        (1.7, []),
    ],
)
def test_factors_are_named_by_the_numbers_they_are_made_of(value: float, named: list[str]) -> None:
    counts = [7, 6, 6, 6, 6, 6]
    shares = [share(index // 3, index % 3, count) for index, count in enumerate(counts)]
    assert name_factor(value, *factors(shares, Layout(data=2, tensor=5, pipeline=7)), 1e-9) == named


def test_factors_that_coincide_are_all_named() -> None:
    shares = [share(0, 0, 7), share(0, 1, 6), share(1, 0, 6), share(1, 1, 6)]
    assert name_factor(0.5, *factors(shares, Layout(data=2)), 1e-9) == [
        "divided once more by the data degree (2)",
        "divided once more by the number of micro-batches (2)",
    ]
