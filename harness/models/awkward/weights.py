"""Awkward weights: tied, aliased, frozen, oddly shaped, laid out or typed: what the registry must get right."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from harness.models.awkward.samples import feature_samples, image_samples, squared_error_sum
from harness.models.awkward.small_gpt import small_gpt
from harness.tensor_plan import ColumnParallel, RowParallel, VocabularyParallel
from harness.workload import Training, Workload

STRONG_DECAY = 0.5
"""Decay that shows after one step where it should not have been applied, or was forgotten."""


def tied() -> Workload:
    """Embedding and head are one parameter: one gradient (their sum), one norm, one decay, one place in memory."""
    return small_gpt(Training(global_batch_size=8, num_micro_batches=2, clip_norm=0.5), tied=True)


def alias() -> Workload:
    """One parameter in two layers and under a third name that is never called: stepped and counted once."""

    def model() -> nn.Module:
        first, second, third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        shared = nn.Parameter(first.weight.detach().clone())
        first.weight = second.weight = shared
        third.register_parameter("uncalled", shared)
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)

    return Workload(
        name="awkward",
        model=model,
        dataset=feature_samples(6, 3),
        training=Training(global_batch_size=8, num_micro_batches=2, clip_norm=0.5),
        loss=squared_error_sum,
        unit="samples",
    )


def biases() -> Workload:
    """Every bias far from zero and every norm gain far from one: none may be added twice, scaled or dropped."""
    training = Training(global_batch_size=8, num_micro_batches=2, optimizer="sgd", learning_rate=0.1)
    return small_gpt(training, change=disturb_vectors)


def disturb_vectors(model: nn.Module) -> None:
    """Adds noise to every vector: biases and norm gains."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.5)


class OddlyShaped(nn.Module):
    """Seven features through parameters of 7, 91, 13, 1, 0, 1, 247, 19 and 57 elements to three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(7))
        self.first = nn.Linear(7, 13)
        self.scale = nn.Parameter(torch.tensor(0.7))  # shape ()
        self.empty = nn.Parameter(torch.empty(0, 13))
        self.shift = nn.Parameter(torch.tensor([0.3]))  # shape (1,)
        self.second = nn.Linear(13, 19)
        self.third = nn.Linear(19, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x * self.gain)) * self.scale
        nothing = linear(x, self.empty)  # (samples, 0)
        x = torch.tanh(self.second(torch.cat([x, nothing], dim=-1) + self.shift))
        outputs: Tensor = self.third(x)
        return outputs


def odd_shapes() -> Workload:
    """Parameters of 1, 7, 13 and 57 elements, a scalar, an empty one; no size divisible by 2 or 4."""
    return Workload(
        name="awkward",
        model=OddlyShaped,
        dataset=feature_samples(7, 3),
        training=Training(global_batch_size=6, num_micro_batches=2, clip_norm=0.5),
        loss=squared_error_sum,
        unit="samples",
    )


def frozen() -> Workload:
    """A frozen embedding and half a block, under strong decay: no gradient, no decay, no state, bits unchanged."""

    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(("embedding.", "block0.perceptron")):
                parameter.requires_grad_(False)

    training = Training(global_batch_size=8, num_micro_batches=2, weight_decay=STRONG_DECAY, clip_norm=0.5)
    return small_gpt(training, change=freeze)


def decay_groups() -> Workload:
    """Decay by name, strong: perceptrons decay, biases and all; the other matrices do not."""
    training = Training(global_batch_size=8, num_micro_batches=2, weight_decay=STRONG_DECAY)
    return small_gpt(training, decays=lambda name, parameter: ".perceptron." in name)


class GroupedQueryAttention(nn.Module):
    """Four query heads of width 4 over two key and value heads, with RMSNorm on queries and keys (one gain a head
    element, shared by all heads)."""

    def __init__(self, width: int, num_heads: int, num_key_value_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, num_key_value_heads * self.head_width)
        self.value = nn.Linear(width, num_key_value_heads * self.head_width)
        self.query_norm = nn.RMSNorm(self.head_width, eps=1e-6)
        self.key_norm = nn.RMSNorm(self.head_width, eps=1e-6)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # each (samples, heads, length, head width)
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(
            self.query_norm(query), self.key_norm(key), value, is_causal=True, enable_gqa=True
        )
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected


class GroupedQueryBlock(nn.Module):
    def __init__(self, width: int = 16, num_heads: int = 4, num_key_value_heads: int = 2) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = GroupedQueryAttention(width, num_heads, num_key_value_heads)

    def forward(self, x: Tensor) -> Tensor:  # (samples, length, width), in and out
        attended: Tensor = x + self.attention(self.norm(x))
        return attended


def gqa() -> Workload:
    """Grouped-query attention with norms on queries and keys: fewer key heads than ranks, and gains shared by heads."""

    def change(model: nn.Module) -> None:
        for name in ("block0", "block1"):
            setattr(model, name, GroupedQueryBlock())
        disturb_vectors(model)

    heads = ColumnParallel(unit=4)
    plan = {
        "embedding.token": VocabularyParallel(),
        **{f"block*.attention.{name}": heads for name in ("query", "key", "value")},
        "block*.attention.projection": RowParallel(unit=4),
        "head.vocabulary": VocabularyParallel(),
    }
    training = Training(global_batch_size=8, num_micro_batches=2, clip_norm=0.5)
    return small_gpt(training, change=change, tensor_plan=lambda model: plan)


class Transposed(nn.Module):
    """A linear layer whose weight is a view with the strides of its transpose."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_inputs, num_outputs).t() / num_inputs)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def non_contiguous() -> Workload:
    """A transposed weight and a channels_last convolution: a collective or a copy must not mistake their strides."""

    def model() -> nn.Module:
        convolution = nn.Conv2d(3, 4, kernel_size=3, padding=1)
        # torch's stubs of Module.to leave memory_format on its own out.
        convolution.weight.data = convolution.weight.data.to(memory_format=torch.channels_last)
        return nn.Sequential(convolution, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), Transposed(16, 5))

    return Workload(
        name="awkward",
        model=model,
        dataset=image_samples((3, 6, 6), num_classes=5),
        training=Training(global_batch_size=8, num_micro_batches=2, clip_norm=0.5),
        unit="samples",
    )


class MixedDtypes(nn.Module):
    """A residual block: fp32 norm, bf16 layer, fp64 scale; the stream is fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.body = nn.Linear(width, width, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:  # (samples, width), in and out
        hidden = torch.tanh(self.body(self.norm(x).to(torch.bfloat16)))
        return x + (hidden.double() * self.scale).to(x.dtype)


def mixed_dtypes() -> Workload:
    """bf16 layers, fp32 norms and fp64 scales in one model: each keeps its dtype, and none is cast in silence."""
    return Workload(
        name="awkward",
        model=lambda: nn.Sequential(nn.Linear(6, 8), MixedDtypes(8), MixedDtypes(8), nn.Linear(8, 3)),
        dataset=feature_samples(6, 3),
        training=Training(global_batch_size=8, num_micro_batches=2),
        loss=squared_error_sum,
        unit="samples",
        fixed_dtypes=True,
    )
