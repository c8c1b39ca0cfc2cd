"""A decoder-only transformer of our own, as a chain of blocks that a pipeline can cut.

    tokens -> embedding -> block0 -> block1 -> ... -> head -> logits

Pre-norm blocks with biases and learned positions: Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners". The larger sizes are GPT-3's (Brown et al. 2020, table 2.1), for planning on the meta device.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from harness.datasets import STANDARD_LIBRARY, open_text
from harness.models._options import check_boolean, check_choice, check_positive_integers
from harness.tensor_plan import ColumnParallel, RowParallel, TensorPlan, VocabularyParallel
from harness.workload import Training, Workload, children_of_sequential


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that make a decoder."""

    num_layers: int
    width: int
    num_heads: int
    vocabulary_size: int = 50257
    sequence_length: int = 2048

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width must be divisible by num_heads, got width {self.width} and {self.num_heads} heads")

    @property
    def num_matrix_parameters(self) -> int:
        """Weights that a token is multiplied with: 12 width^2 a layer, and the vocabulary's (tied or not)."""
        return 12 * self.num_layers * self.width**2 + self.width * self.vocabulary_size

    @property
    def flops_per_token(self) -> float:
        """Forward and backward without recomputation: 6 a matrix weight, and 12 * layers * width * sequence length for
        attention (Chowdhery et al. 2022, appendix B), which counts the masked half as well."""
        return 6.0 * self.num_matrix_parameters + 12.0 * self.num_layers * self.width * self.sequence_length


# The table gives xl 24 heads of 128 and 13b a width of 5140, which do not multiply out: here 16 heads, and 40 of 128.
SIZES = {
    "tiny": Shape(num_layers=2, width=32, num_heads=4, vocabulary_size=256, sequence_length=16),
    "0.9m": Shape(num_layers=4, width=128, num_heads=4, vocabulary_size=512, sequence_length=64),
    "17m": Shape(num_layers=6, width=384, num_heads=6, vocabulary_size=8192, sequence_length=128),
    "30m": Shape(num_layers=8, width=480, num_heads=8, vocabulary_size=8192, sequence_length=256),
    "small": Shape(num_layers=12, width=768, num_heads=12),
    "medium": Shape(num_layers=24, width=1024, num_heads=16),
    "large": Shape(num_layers=24, width=1536, num_heads=16),
    "xl": Shape(num_layers=24, width=2048, num_heads=16),
    "2.7b": Shape(num_layers=32, width=2560, num_heads=32),
    "6.7b": Shape(num_layers=32, width=4096, num_heads=32),
    "13b": Shape(num_layers=40, width=5120, num_heads=40),
    "175b": Shape(num_layers=96, width=12288, num_heads=96),
}


class Embedding(nn.Module):
    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary_size, shape.width)
        self.position = nn.Embedding(shape.sequence_length, shape.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:  # (samples, length) -> (samples, length, width)
        embedded: Tensor = self.dropout(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        return embedded


class Attention(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.head_width = shape.width // shape.num_heads
        self.attention_dropout = dropout
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        # (samples, length, 3 * width) -> three of (samples, heads, length, head width); a slice has fewer heads
        heads = self.query_key_value(x).view(samples, length, 3, -1, self.head_width)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.attention_dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).reshape(samples, length, -1))
        return projected


class Perceptron(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.expansion = nn.Linear(shape.width, 4 * shape.width)
        self.gelu = nn.GELU()
        self.projection = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.gelu(self.expansion(x)))
        return projected


class Block(nn.Module):
    def __init__(self, shape: Shape, dropout: float = 0.0, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape, attention_dropout)
        self.perceptron_norm = nn.LayerNorm(shape.width)
        self.perceptron = Perceptron(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (samples, length, width), in and out
        attended = x + self.dropout(self.attention(self.attention_norm(x)))
        transformed: Tensor = attended + self.dropout(self.perceptron(self.perceptron_norm(attended)))
        return transformed


class Head(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.vocabulary = nn.Linear(shape.width, shape.vocabulary_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (samples, length, width) -> (samples, length, vocabulary)
        logits: Tensor = self.vocabulary(self.norm(x))
        return logits


def decoder(shape: Shape, *, tied: bool = False, dropout: float = 0.0, attention_dropout: float = 0.0) -> nn.Sequential:
    """The module, initialised. `tied` makes the embedding's and the head's vocabulary weights one parameter."""
    embedding, head = Embedding(shape, dropout), Head(shape)
    blocks = {f"block{index}": Block(shape, dropout, attention_dropout) for index in range(shape.num_layers)}
    model = nn.Sequential(OrderedDict({"embedding": embedding, **blocks, "head": head}))
    if tied:
        head.vocabulary.weight = embedding.token.weight
    initialise(model, shape)
    return model


def tensor_plan(shape: Shape) -> TensorPlan:
    """Attention by heads, the perceptron by its inner width, embedding and head by the vocabulary."""
    head_width = shape.width // shape.num_heads
    return {
        "embedding.token": VocabularyParallel(),
        "block*.attention.query_key_value": ColumnParallel(unit=head_width, parts=3),
        "block*.attention.projection": RowParallel(unit=head_width),
        "block*.perceptron.expansion": ColumnParallel(),
        "block*.perceptron.projection": RowParallel(),
        "head.vocabulary": VocabularyParallel(),
    }


def initialise(model: nn.Module, shape: Shape) -> None:
    """As GPT-2: normal weights, those that write to the residual stream smaller by sqrt(2 * layers). The deviation,
    sqrt(2 / (5 * width)) (Nguyen and Salazar 2019), is GPT-2's 0.02 at its width and lets narrow models attend too.
    Biases are normal, where GPT-2 has zeros: a bias of zero hides that it was added twice, or lost."""
    deviation = math.sqrt(2 / (5 * shape.width))
    for name, parameter in model.named_parameters():
        if name.endswith("projection.weight"):
            nn.init.normal_(parameter, std=deviation / math.sqrt(2 * shape.num_layers))
        elif parameter.ndim >= 2 or name.endswith("bias"):
            nn.init.normal_(parameter, std=deviation)


DEFAULT_TRAINING = Training(global_batch_size=8)


def workload(
    training: Training = DEFAULT_TRAINING,
    *,
    size: str = "tiny",
    tied: bool = False,
    sequence_length: int | None = None,
    vocabulary_size: int | None = None,
    dropout: float = 0.0,
    attention_dropout: float | None = None,
    text: str = STANDARD_LIBRARY,
) -> Workload:
    """Next-token prediction. `dropout` is that of embeddings and residuals, and of the attention's weights too unless
    `attention_dropout` says otherwise. `text` is `stdlib`, a text file (a token a byte) or a `.bin` file of uint16
    tokens. ValueError for an unknown size, or a text that does not fit the vocabulary or the sequence length."""
    check_choice("size", size, SIZES)
    check_boolean("tied", tied)
    of_attention = dropout if attention_dropout is None else attention_dropout
    for name, share in (("dropout", dropout), ("attention_dropout", of_attention)):
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"{name} must be a number in [0, 1), got {share!r}")
    shape = SIZES[size]
    overrides = {"sequence_length": sequence_length, "vocabulary_size": vocabulary_size}
    given = {name: value for name, value in overrides.items() if value is not None}
    check_positive_integers(**given)
    shape = replace(shape, **given)
    return Workload(
        name="gpt",
        model=lambda: decoder(shape, tied=tied, dropout=dropout, attention_dropout=of_attention),
        dataset=open_text(text, sequence_length=shape.sequence_length, vocabulary_size=shape.vocabulary_size),
        training=training,
        tensor_plan=lambda model: tensor_plan(shape),
        chain=children_of_sequential,
        uses_random_numbers=max(dropout, of_attention) > 0,
        draws_in_regions=of_attention > 0,
        depends_on_chunks=max(dropout, of_attention) > 0,
        flops_per_unit=shape.flops_per_token,
    )
