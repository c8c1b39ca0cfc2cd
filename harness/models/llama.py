"""transformers' LlamaForCausalLM built from a configuration: random weights, nothing downloaded.

Grouped-query attention, RMSNorm, SwiGLU, rotary positions: Touvron et al. 2023, "Llama 2".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.datasets import STANDARD_LIBRARY, open_text
from harness.models._options import check_boolean, check_choice
from harness.tensor_plan import TensorPlan, from_transformers, under
from harness.workload import Training, Workload

# In the names of transformers' LlamaConfig.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 16,
    },
    "15m": {
        "num_hidden_layers": 6,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 128,
    },
}
_ATTENTION = "sdpa_causal"


class Llama(nn.Module):
    """Tokens (samples, length) to logits (samples, length, vocabulary), without a cache and without anything else."""

    def __init__(self, sizes: dict[str, int], *, tied: bool) -> None:
        super().__init__()
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # The same kernel under a name of our own, for which transformers prepares no mask: to learn whether it needs
        # one it would look at values, which a GPU must be waited for and which a meta tensor does not have.
        AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
        config = LlamaConfig(**sizes, tie_word_embeddings=tied, use_cache=False, attn_implementation=_ATTENTION)
        self.causal = LlamaForCausalLM(config)
        _compute_norms_in_own_dtype(self.causal)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.causal(input_ids=tokens, use_cache=False).logits
        return logits


def _compute_norms_in_own_dtype(model: nn.Module) -> None:
    """transformers' norm rounds to fp32 whatever it is given, which would spoil the fp64 lane; torch's does not."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norms: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, LlamaRMSNorm)]
    for name, norm in norms:
        model.set_submodule(name, nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon))


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The transformer's layers, of which each is recomputed and gathered as a whole."""
    causal: Any = model.causal
    return list(causal.model.layers)


class Decoder(nn.Module):
    """A layer as a block of a chain, (samples, length, width) in and out. The rotary angles that the whole model hands
    to all its layers are the positions' alone: each block makes them again, so that they need not travel."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        transformed: Tensor = self.layer(x, attention_mask=None, position_embeddings=self.rotary(x, positions))
        return transformed


class Head(nn.Sequential):
    """(samples, length, width) to logits (samples, length, vocabulary)."""


def chain(model: nn.Module) -> Sequence[nn.Module]:
    """Embedding, layers, and the last norm with the vocabulary's weights. They hold the modules of `model`, whose own
    forward does not go by them."""
    causal: Any = model.causal
    decoder = causal.model
    layers = [Decoder(layer, decoder.rotary_emb) for layer in decoder.layers]
    return [decoder.embed_tokens, *layers, Head(decoder.norm, causal.lm_head)]


def tensor_plan(model: nn.Module) -> TensorPlan:
    """transformers' own."""
    causal: Any = model.causal
    return under("causal", from_transformers(causal))


def flops_per_token(sizes: dict[str, int]) -> float:
    """Forward and backward: 6 a matrix weight, and 12 * layers * width * sequence length for attention (Chowdhery et
    al. 2022, appendix B)."""
    width, num_layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    key_value_width = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer = 2 * width**2 + 2 * width * key_value_width + 3 * width * sizes["intermediate_size"]
    matrices = num_layers * layer + width * sizes["vocab_size"]
    return 6.0 * matrices + 12.0 * num_layers * width * sizes["max_position_embeddings"]


DEFAULT_TRAINING = Training(global_batch_size=8)


def workload(
    training: Training = DEFAULT_TRAINING, *, size: str = "tiny", tied: bool = False, text: str = STANDARD_LIBRARY
) -> Workload:
    """Next-token prediction on a text as in `gpt`. ValueError for an unknown size, or if transformers is missing."""
    check_choice("size", size, SIZES)
    check_boolean("tied", tied)
    try:
        import transformers  # noqa: F401  only to learn whether it is there
    except ImportError as error:
        raise ValueError(f'llama needs transformers, which is missing: pip install "meshmark[hf]" ({error})') from error
    sizes = SIZES[size]
    return Workload(
        name="llama",
        model=lambda: Llama(sizes, tied=tied),
        dataset=open_text(text, sequence_length=sizes["max_position_embeddings"], vocabulary_size=sizes["vocab_size"]),
        training=training,
        blocks=decoder_layers,
        tensor_plan=tensor_plan,
        chain=chain,
        flops_per_unit=flops_per_token(sizes),
    )
