"""What may lie between cut layers where the sequence is cut there."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness import models
from harness.datasets import Tensors
from harness.implementation import load
from harness.layout import Layout
from harness.sequence_cuts import AcrossSequence, check_positions
from harness.tensor_plan import ColumnParallel, RowParallel, VocabularyParallel, resolve
from harness.workload import Training, Workload

WIDTH, LENGTH, VOCABULARY = 4, 8, 16
PLAN = {"*up": ColumnParallel(), "*down": RowParallel(), "head": VocabularyParallel()}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.up(x).tanh())
        return output


class Bypassed(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Block(nn.Module):
    """`between` works on what lies between the perceptron and its sum."""

    def __init__(
        self, between: Callable[[Tensor], Tensor], perceptron: type[nn.Module] = Perceptron, *, own: nn.Module
    ) -> None:
        super().__init__()
        self.perceptron, self.between, self.own = perceptron(), between, own

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.own(self.between(self.perceptron(x)))
        return output


class Model(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCABULARY, WIDTH), block
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.block(self.embedding(tokens))))
        return logits


class Positions(nn.Module):
    """Each rank would give its piece the first positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


def attention(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)).softmax(-1) @ x


def check(between: Callable[[Tensor], Tensor], own: Callable[[], nn.Module] = nn.Identity) -> None:
    with torch.device("meta"):
        model = Model(Block(between, own=own()))
    check_positions(model, resolve(model, PLAN), [model.block], torch.zeros(2, LENGTH, dtype=torch.int64))


@pytest.mark.parametrize(
    ("between", "own"),
    [
        (lambda x: x, lambda: nn.LayerNorm(WIDTH)),
        (lambda x: x, lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.GELU(), nn.Linear(3, WIDTH, bias=False))),
        (lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True)), nn.Identity),
        (lambda x: x.transpose(0, 1).reshape(-1, WIDTH).view(x.shape[1], -1, WIDTH).transpose(0, 1), nn.Identity),
        (lambda x: x * torch.ones_like(x) + x.new_ones(WIDTH), nn.Identity),
        (lambda x: x.softmax(-1), nn.Identity),
    ],
)
def test_what_works_position_by_position_may(between: Callable[[Tensor], Tensor], own: Callable[[], nn.Module]) -> None:
    check(between, own)


@pytest.mark.parametrize(
    ("between", "own", "message"),
    [
        (lambda x: x.mean(1, keepdim=True), nn.Identity, "block mean works along the sequence"),
        (lambda x: x.mean((0, 1)), nn.Identity, "block mean works along the sequence"),
        (lambda x: x.sum(), nn.Identity, "block sum brings positions together"),
        (lambda x: x[:, :1], nn.Identity, "block slice brings positions together"),
        (lambda x: x.cumsum(1), nn.Identity, "block cumsum works along the sequence"),
        (lambda x: x.flip(-2), nn.Identity, "block flip works along the sequence"),
        (lambda x: x.softmax(1), nn.Identity, "block _softmax works along the sequence"),
        (attention, nn.Identity, "block bmm pairs positions"),
        (lambda x: x @ (x.transpose(1, 2) @ x), nn.Identity, "block bmm sums over positions"),
        (lambda x: nn.functional.layer_norm(x, x.shape[1:]), nn.Identity, "normalises over positions"),
        (lambda x: x + torch.arange(x.shape[1]).unsqueeze(1), nn.Identity, r"block add meets a tensor \(length, 1\)"),
        (lambda x: x, Positions, r"block\.own add meets a tensor \(length, 4\) of the whole sequence"),
        (
            lambda x: x.transpose(1, 2),
            lambda: nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Flatten(1), nn.Unflatten(1, (-1, WIDTH))),
            r"block\.own\.0 convolution works across positions",
        ),
    ],
)
def test_what_works_across_positions_is_refused_by_name(
    between: Callable[[Tensor], Tensor], own: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(AcrossSequence, match=f"sequence_parallel: .*{message}"):
        check(between, own)


class NormedTwice(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.block(self.norm(self.embedding(tokens)))))
        return logits


class Scaled(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.norm.weight[0]


class GatedFromBefore(Model):
    """The gate is made while the sequence is whole: its gradient comes from pieces."""

    def forward(self, tokens: Tensor) -> Tensor:
        gate = self.embedding.weight[0].sigmoid()
        logits: Tensor = self.head(self.norm(self.block(self.embedding(tokens)) * gate))
        return logits


class ScaledFromBetween(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block(self.embedding(tokens))
        scale = self.norm.weight.exp().sum()
        logits: Tensor = self.head(self.norm(x)) * scale
        return logits


class Repeating(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.block(self.block(self.embedding(tokens)))))
        return logits


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (NormedTwice, "norm.weight is used before the sequence is cut, and where a rank has a piece of the sequence"),
        (Scaled, "norm.weight is used where a rank has a piece of the sequence, and past the head, where it is whole"),
        (GatedFromBefore, r"mul meets a tensor \(4\) made before the sequence is cut"),
        (ScaledFromBetween, r"mul takes past the head, where it is whole again, a tensor \(\) that was made where"),
        (Repeating, "the first block with cut layers is called more than once"),
    ],
)
def test_gradients_that_would_be_summed_where_they_are_whole_or_not_where_they_are_summands(
    model: type[Model], message: str
) -> None:
    with torch.device("meta"):
        made = model(Block(lambda x: x, own=nn.Identity()))
    with pytest.raises(AcrossSequence, match=message):
        check_positions(made, resolve(made, PLAN), [made.block], torch.zeros(2, LENGTH, dtype=torch.int64))


def workload(perceptron: type[nn.Module] = Perceptron, between: Callable[[Tensor], Tensor] = torch.tanh) -> Workload:
    tokens = torch.arange(8 * LENGTH).reshape(8, LENGTH) % VOCABULARY
    return Workload(
        name="own",
        model=lambda: Model(Block(between, perceptron, own=nn.Identity())),
        dataset=Tensors(tokens, tokens),
        training=Training(global_batch_size=4),
        blocks=lambda model: [model.block],
        tensor_plan=lambda model: PLAN,
    )


def refusal(work: Workload, name: str = "native.tensor", **options: bool) -> str | None:
    layout = Layout(tensor=2, data=2 if "hybrid" in name else 1)
    return load(name).unsupported(work, layout, torch.device("cpu"), options)


def test_it_is_asked_where_the_sequence_is_cut_only() -> None:
    pooled = workload(between=lambda x: x.mean(1, keepdim=True))
    for name in ("native.tensor", "native.hybrid"):
        assert refusal(pooled, name) is None
        assert "block mean works along the sequence" in str(refusal(pooled, name, sequence_parallel=True))
        assert refusal(workload(), name, sequence_parallel=True) is None


def test_a_sum_that_bypasses_a_single_column_parallel_layer_is_refused_too() -> None:
    """Without a cut sequence the layer takes the input for itself."""
    assert refusal(workload(Bypassed)) is None
    reason = refusal(workload(Bypassed), sequence_parallel=True)
    assert reason is not None
    assert "block.perceptron adds its input to what its row-parallel layer yields" in reason


@pytest.mark.parametrize("text", ["gpt:size=tiny,tied=true", "llama:size=tiny", "awkward:kind=vocabulary"])
def test_our_models_may_be_cut(text: str) -> None:
    assert models.load(text).fits_tensor_degree(2, cuts_sequence=True) is None


def test_a_plan_without_a_head_is_refused() -> None:
    work = workload()
    headless = Workload(**{**vars(work), "tensor_plan": lambda model: {k: v for k, v in PLAN.items() if k != "head"}})
    assert str(refusal(headless, sequence_parallel=True)).startswith(
        "sequence_parallel needs a vocabulary-parallel head"
    )
