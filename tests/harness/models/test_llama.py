import math
import sys

import pytest
import torch

from harness import models
from harness.chain import run_blocks
from harness.models.llama import chain
from harness.parameters import logical_parameters
from harness.workload import Workload, in_precision


def test_missing_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r'llama needs transformers, which is missing: pip install "meshmark\[hf\]"'):
        models.load("llama")


@pytest.fixture(scope="module")
def tiny() -> Workload:
    pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    return in_precision(models.load("llama"), "fp64")


def losses(workload: Workload, data_degree: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of step 0, with the shares of all data ranks fed one after another."""
    model, total = workload.build_model(), 0.0
    for rank in range(data_degree):
        batch = workload.batch(0, data_rank=rank, data_degree=data_degree)
        for micro_batch in batch.micro_batches:
            loss = workload.loss_sum(model, micro_batch) / batch.global_num_tokens
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_is_a_grouped_query_decoder(tiny: Workload) -> None:
    model = tiny.build_model()
    shapes = {p.name: p.shape for p in logical_parameters(model)}
    assert shapes["causal.model.layers.0.self_attn.q_proj.weight"] == (32, 32)
    assert shapes["causal.model.layers.0.self_attn.k_proj.weight"] == (16, 32)
    assert shapes["causal.model.layers.1.input_layernorm.weight"] == (32,)
    assert len(tiny.blocks(model)) == 2
    tokens = tiny.batch(0).micro_batches[0].inputs
    assert model(tokens).shape == (8, 16, 256)


def test_the_chain_is_the_model(tiny: Workload) -> None:
    model = tiny.build_model()
    tokens = tiny.batch(0).micro_batches[0].inputs
    blocks = chain(model)
    assert len(blocks) == 4
    assert torch.equal(run_blocks(blocks, [tokens])[0], model(tokens))


def test_fp64_is_fp64_throughout(tiny: Workload) -> None:
    """A norm or a softmax rounded to fp32 would part by about 1e-7 between two scales of the same loss."""
    loss, gradients = losses(tiny, data_degree=1)
    assert loss == pytest.approx(math.log(256), rel=0.02)
    model = tiny.build_model()
    batch = tiny.batch(0)
    (tiny.loss_sum(model, batch.micro_batches[0]) / 3.0).backward()
    for name, parameter in model.named_parameters():
        expected = gradients[name] * (batch.global_num_tokens / 3.0)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-11, atol=1e-13)


def test_shares_add_up_to_the_whole(tiny: Workload) -> None:
    whole_loss, whole = losses(tiny, data_degree=1)
    loss, parts = losses(tiny, data_degree=3)
    assert loss == pytest.approx(whole_loss, rel=1e-13)
    assert all(torch.allclose(parts[name], whole[name], rtol=1e-11, atol=1e-15) for name in whole)


def test_checkpointing_keeps_the_gradients() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    _, plain = losses(in_precision(models.load("llama:tied=true"), "fp64"), 1)
    _, recomputed = losses(in_precision(models.load("llama:tied=true,activation_checkpointing=true"), "fp64"), 1)
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_tied_vocabulary_is_one_parameter() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    parameters = logical_parameters(models.load("llama:tied=true").build_model())
    (vocabulary,) = (p for p in parameters if p.aliases)
    assert vocabulary.name == "causal.model.embed_tokens.weight" and vocabulary.aliases == ("causal.lm_head.weight",)


def test_15m_has_about_15_million_parameters() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    with torch.device("meta"):
        model = models.load("llama:size=15m").model()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(15.5e6, rel=0.03)
