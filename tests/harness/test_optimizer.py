"""The recipe in plain torch, against arithmetic written out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from harness.datasets import Tensors
from harness.optimizer import RecipeOptimizer, clip_coefficient, decay_groups, global_norm
from harness.parameters import logical_parameters
from harness.workload import Training, Workload, in_precision


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


def work(precision: str = "fp64", **training: Any) -> Workload:
    dataset = Tensors(torch.zeros(2, 3), torch.zeros(2, 2))
    recipe = Training(**{"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.5, **training})
    return in_precision(Workload(name="work", model=model, dataset=dataset, training=recipe), precision)


def with_gradients(workload: Workload, value: float = 1.0) -> tuple[nn.Module, RecipeOptimizer]:
    module = workload.build_model()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return module, RecipeOptimizer(module, workload)


def test_matrices_decay_and_vectors_do_not() -> None:
    module, optimizer = with_gradients(work())
    before = optimizer.full_parameters(module)
    optimizer.step(tracks_norm=False)
    for name, value in optimizer.full_parameters(module).items():
        decay = 0.5 if before[name].ndim == 2 else 0.0
        torch.testing.assert_close(value, before[name] - 0.1 * (1.0 + decay * before[name]))


def test_groups_follow_the_registry_and_empty_ones_are_left_out() -> None:
    module = model()
    registry = logical_parameters(module, lambda name, parameter: True)
    (group,) = decay_groups(registry, list(module.parameters()), 0.5)
    assert group["weight_decay"] == 0.5
    assert len(list(group["params"])) == 5  # type: ignore[call-overload]
    decayed, others = decay_groups(logical_parameters(module), list(module.parameters()), 0.5)
    assert [len(g["params"]) for g in (decayed, others)] == [2, 3]  # type: ignore[arg-type]
    assert others["weight_decay"] == 0.0


def test_the_norm_is_over_all_elements_of_all_tensors() -> None:
    assert float(global_norm([torch.tensor([3.0]), torch.tensor([[0.0], [4.0]])])) == 5.0
    assert float(global_norm([])) == 0.0
    assert global_norm([torch.ones(2)]).dtype is torch.float64
    ones = torch.ones(1 << 12, dtype=torch.bfloat16)  # in bf16 a sum of ones stands still at 256
    assert float(global_norm([ones, ones])) == pytest.approx(math.sqrt(2 << 12))
    assert math.isinf(float(global_norm([torch.tensor([math.inf]), torch.ones(2)])))


@pytest.mark.parametrize(("norm", "coefficient"), [(10.0, 0.1), (1.0, 1.0), (0.5, 1.0), (0.0, 1.0)])
def test_clipping_brings_the_norm_to_the_bound_and_never_up(norm: float, coefficient: float) -> None:
    got = float(clip_coefficient(torch.tensor(norm, dtype=torch.float64), 1.0))
    assert got == pytest.approx(coefficient, rel=2e-6)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_gradients_are_clipped_for_the_update_and_told_unclipped(precision: str) -> None:
    module, optimizer = with_gradients(work(precision, clip_norm=0.5, weight_decay=0.0))
    before = optimizer.full_parameters(module)
    update = optimizer.step(tracks_norm=False)
    num_elements = sum(p.numel() for p in module.parameters())
    assert update.gradient_norm is not None
    assert float(update.gradient_norm) == pytest.approx(math.sqrt(num_elements))
    tolerance = {"fp64": 2e-6, "fp32": 1e-5, "bf16": 2**-8}[precision]
    for name, gradient in optimizer.unclipped_gradients().items():
        torch.testing.assert_close(gradient.double(), torch.ones_like(gradient).double(), rtol=tolerance, atol=0)
        moved = (before[name] - optimizer.full_parameters(module)[name]).double()
        expected = torch.full_like(moved, 0.1 * 0.5 / math.sqrt(num_elements))
        torch.testing.assert_close(moved, expected, rtol=tolerance, atol=1e-7 if precision != "fp64" else 0)


def test_a_step_that_is_not_finite_changes_nothing_and_counts_for_no_update() -> None:
    workload = work(skip_nonfinite=True, warmup_steps=4, optimizer="adamw")
    module, optimizer = with_gradients(workload)
    first = optimizer.step(tracks_norm=False)
    before = [tensor.clone() for tensor in (*module.parameters(), *optimizer.state_tensors())]
    module[0].weight.grad[0, 0] = math.nan
    skipped = optimizer.step(tracks_norm=False)
    assert all(
        torch.equal(a, b) for a, b in zip(before, (*module.parameters(), *optimizer.state_tensors()), strict=True)
    )
    module[0].weight.grad.fill_(1.0)
    third = optimizer.step(tracks_norm=False)
    assert [update.skipped for update in (first, skipped, third)] == [False, True, False]
    rates = [update.learning_rates[0] for update in (first, skipped, third)]
    assert rates == pytest.approx([0.025, 0.05, 0.05])


def test_unused_parameters_neither_decay_nor_move_and_are_absent() -> None:
    module, optimizer = with_gradients(work(optimizer="adamw"))
    optimizer.step(tracks_norm=False)
    before = optimizer.full_parameters(module)
    module[2].weight.grad = None
    optimizer.step(tracks_norm=False)
    after = optimizer.full_parameters(module)
    assert "2.weight" not in optimizer.unclipped_gradients()
    assert [name for name in after if torch.equal(after[name], before[name])] == ["2.weight"]


def test_frozen_parameters_have_no_state_and_are_told_all_the_same() -> None:
    workload = work(optimizer="adamw")
    module = workload.build_model()
    module[0].requires_grad_(False)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer = RecipeOptimizer(module, workload)
    optimizer.step(tracks_norm=False)
    assert optimizer.full_parameters(module).keys() == dict(module.named_parameters()).keys()
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert sum(t.numel() for t in optimizer.state_tensors() if t.ndim) == 2 * trained


def test_a_model_without_anything_to_train_has_no_optimizer() -> None:
    workload = work()
    module = workload.build_model().requires_grad_(False)
    optimizer = RecipeOptimizer(module, workload)
    assert optimizer.step(tracks_norm=True).learning_rates == ()
    assert optimizer.num_groups == 0


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "bf16_fp32_gradients"])
def test_only_low_precision_has_masters_and_parameters_are_rounded_from_them(precision: str) -> None:
    module, optimizer = with_gradients(work(precision, learning_rate=1e-4))
    assert optimizer.uses_masters is precision.startswith("bf16")
    before = [parameter.detach().clone() for parameter in module.parameters()]
    for _ in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(tracks_norm=False)
    masters = optimizer.full_parameters(module)
    for start, (name, parameter) in zip(before, module.named_parameters(), strict=True):
        assert torch.equal(parameter, masters[name].to(parameter.dtype))
        decay = 0.5 if start.ndim == 2 else 0.0
        expected = start.to(masters[name].dtype)
        for _ in range(3):
            expected = expected - 1e-4 * (1 + decay * expected)
        torch.testing.assert_close(masters[name], expected, rtol=1e-6, atol=1e-7)
    if optimizer.uses_masters:  # 1 - 3e-4 is 1 in bf16: only the masters have moved
        assert torch.equal(module[1].weight, torch.ones(4, dtype=torch.bfloat16))
        assert not torch.equal(masters["1.weight"], torch.ones(4))


def test_a_workload_of_fixed_dtypes_has_no_masters_in_any_precision() -> None:
    fixed = in_precision(replace(work(), fixed_dtypes=True), "bf16_fp32_gradients")
    module, optimizer = with_gradients(fixed)
    assert not optimizer.uses_masters
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert fixed.precision.master is None


def test_another_optimizer_class_gets_the_same_groups() -> None:
    taken: list[dict[str, object]] = []

    def factory(groups: list[dict[str, object]]) -> Optimizer:
        taken.extend(groups)
        return SGD(groups, lr=1.0)

    workload = work()
    module = workload.build_model()
    optimizer = RecipeOptimizer(module, workload, factory)
    assert [group["weight_decay"] for group in taken] == [0.5, 0.0]
    before = module[1].bias.detach().clone()
    gradients: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        parameter.grad = gradients[name] = torch.ones_like(parameter)
    assert optimizer.step(tracks_norm=False).learning_rates == (0.1, 0.1)
    torch.testing.assert_close(module[1].bias, before - 0.1)
    optimizer.clear_gradients()
    assert optimizer.live_gradients() == []


def test_the_norm_of_a_long_flat_buffer_keeps_its_digits() -> None:
    gradient = torch.randn(6_500_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(global_norm([gradient]), gradient.double().norm(), rtol=1e-7, atol=0.0)


def test_shards_are_stepped_in_place_of_the_parameters_by_the_norm_of_all() -> None:
    workload = work(clip_norm=1.0, weight_decay=0.0)
    module = workload.build_model()
    shards = {name: parameter.detach()[:1].clone() for name, parameter in module.named_parameters()}
    optimizer = RecipeOptimizer(module, workload, stepped=shards)
    before = {name: shard.clone() for name, shard in shards.items()}
    for shard in shards.values():
        shard.grad = torch.ones_like(shard)
    update = optimizer.step(
        tracks_norm=False, norm_of=lambda named: torch.tensor(10.0 * (named.keys() == shards.keys()))
    )
    assert update.gradient_norm == 10.0
    for name, shard in shards.items():
        torch.testing.assert_close(shard, before[name] - 0.1 / 10.0)
