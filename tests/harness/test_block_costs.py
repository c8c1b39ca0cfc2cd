"""Costs of blocks, against counts by hand and against the memory instrument's dry run."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import Tensor, nn

from harness import models
from harness.block_costs import BlockCosts, analyse
from harness.chain import NoChain, TensorShape
from harness.datasets import Tensors
from harness.measure.predicted_memory import dry_run
from harness.workload import Training, Workload, children_of_sequential, in_precision


def small(model: nn.Module, num_micro_batches: int = 1) -> Workload:
    """Micro-batches of 4 samples, 3 numbers in and 2 out."""
    return Workload(
        name="small",
        model=lambda: model,
        dataset=Tensors(torch.zeros(16, 3), torch.zeros(16, 2)),
        loss=lambda outputs, targets: (outputs - targets).square().sum(),
        training=Training(global_batch_size=4 * num_micro_batches, num_micro_batches=num_micro_batches),
        chain=children_of_sequential,
    )


def layers() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def test_a_chain_counted_by_hand() -> None:
    """tanh and the last layer keep tanh's output, one storage; nobody keeps the first layer's. The loss keeps the
    differences and its own value. FLOPs: two an element of each product; the batch needs no gradient."""
    first, tanh, last = analyse(small(layers(), num_micro_batches=2))
    border = (TensorShape(shape=(4, 5), dtype=torch.float32, carries_gradient=True),)
    assert (first.border, tanh.border, last.border) == (border, border, ())
    assert (first.kept_bytes, tanh.kept_bytes, last.kept_bytes) == (0, 4 * 5 * 4, 4 * 2 * 4 + 4)
    assert (first.unkept_border_bytes, tanh.unkept_border_bytes) == (4 * 5 * 4, 0)
    assert (first.forward_flops, first.backward_flops) == (2 * 4 * 3 * 5, 2 * 4 * 3 * 5)
    assert (tanh.flops, last.forward_flops, last.backward_flops) == (0, 2 * 4 * 5 * 2, 2 * 2 * 4 * 5 * 2)
    assert (first.num_parameters, tanh.num_parameters, last.num_parameters) == (20, 0, 12)
    assert (first.name, first.kind) == ("0", "Linear")


def test_backward_does_not_come_to_what_is_frozen_from_the_start() -> None:
    model = layers()
    model[0].requires_grad_(False)  # type: ignore[index]
    first, _, last = analyse(small(model))
    assert not first.border[0].carries_gradient
    assert (first.backward_flops, last.backward_flops) == (0, 2 * 4 * 5 * 2)


def test_a_decoder_has_the_flops_of_theory() -> None:
    """Forward 2 for each weight and token, and 4 * length * width a token for attention; backward twice that, and the
    scores once more."""
    embedding, block, _, head = analyse(models.load("gpt:size=tiny,global_batch_size=8,num_micro_batches=4"))
    tokens, width, length = 2 * 16, 32, 16
    attention = 4 * length * width * tokens
    products = 2 * 12 * width**2 * tokens
    assert (embedding.flops, block.forward_flops) == (0, products + attention)
    assert block.backward_flops == 2 * products + 5 * attention // 2
    assert head.forward_flops == 2 * width * 256 * tokens


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("text", ["gpt:size=tiny", "gpt:size=tiny,tied=true", "gpt:size=tiny,sequence_length=64"])
def test_what_blocks_keep_adds_up_to_the_dry_run_of_the_whole(text: str, precision: str) -> None:
    workload = in_precision(models.load(text), precision)
    assert sum(block.kept_bytes for block in analyse(workload)) == dry_run(workload, 8).activation_bytes


def test_checkpointed_blocks_keep_their_inputs_alone_and_compute_twice() -> None:
    plain, saving = (analyse(models.load(f"gpt:size=tiny{more}")) for more in ("", ",activation_checkpointing=true"))
    inputs = 8 * 16 * 32 * 4
    assert [block.kept_bytes for block in saving[:2]] == [inputs, inputs]
    assert plain[1].kept_bytes > 10 * inputs
    assert plain[1].backward_flops < saving[1].backward_flops <= plain[1].backward_flops + plain[1].forward_flops


def test_tied_weights_are_one_parameter_under_its_first_name() -> None:
    blocks = analyse(models.load("gpt:size=tiny,tied=true"))
    (vocabulary,) = (parameter for parameter in blocks[-1].parameters if parameter.name.startswith("embedding"))
    assert vocabulary in blocks[0].parameters and vocabulary.aliases == ("head.vocabulary.weight",)


def test_a_model_of_billions_of_parameters_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    blocks: tuple[BlockCosts, ...] = analyse(models.load("gpt:size=13b"))
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert sum(block.num_parameters for block in blocks) == pytest.approx(13e9, rel=0.02)
    assert grown_bytes < 1e9


def test_a_loss_that_reads_values_says_so() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum() if float(targets.sum()) > 0 else -outputs.sum()

    workload = small(layers())
    object.__setattr__(workload, "loss", loss)
    with pytest.raises(NoChain, match="pipeline: the loss cannot be computed without values: DataDependentOutput"):
        analyse(workload)
