import pytest
import torch
from torch import nn

from harness import models
from harness.models import convnet


def test_local_and_synchronised_differ_in_what_is_asked_of_implementations() -> None:
    local, synchronised = (models.load(f"convnet:batch_norm={name}") for name in convnet.BATCH_NORMS)
    assert local.depends_on_chunks and not local.synchronise_batch_norm
    assert synchronised.synchronise_batch_norm and not synchronised.depends_on_chunks
    for workload in (local, synchronised):
        assert workload.unit == "samples"
        norms = [module for module in workload.build_model().modules() if isinstance(module, nn.BatchNorm2d)]
        assert [norm.num_features for norm in norms] == [16, 32, 64]


def test_learns_the_digits() -> None:
    workload = models.load("convnet:width=8")
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.training.learning_rate, momentum=0.9)
    losses = []
    for step in range(60):
        batch = workload.batch(step)
        loss = workload.loss_sum(model, batch.micro_batches[0]) / batch.global_num_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(2.3, abs=0.3)  # log(10): a guess
    assert sum(losses[-5:]) / 5 < 0.8


def test_flops_count_each_weight_at_each_position() -> None:
    # width 2: convolutions of 18, 72 and 288 weights at 64, 64 and 16 positions, a matrix of 80.
    assert models.load("convnet:width=2").flops_per_unit == 6 * (18 * 64 + 72 * 64 + 288 * 16 + 80)
    sizes = [p.numel() for name, p in convnet.network(2).named_parameters() if p.ndim >= 2]
    assert sizes == [18, 72, 288, 80]
