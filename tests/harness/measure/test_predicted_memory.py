"""Predictions without running anything, held against what a real loop allocates."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from harness import models
from harness.implementation import DryStep, Implementation, phase
from harness.layout import Layout
from harness.measure.memory import NUM_WARM_UP_STEPS, MemoryRecorder, MemoryReport
from harness.measure.predicted_memory import dry_run, largest_micro_batch, predicted, registry
from harness.parameters import logical_parameters, replicated_state_bytes
from harness.precision import PRECISIONS
from harness.workload import Batch, Training, Workload

CPU = torch.device("cpu")
GPT = models.load("gpt:size=tiny,global_batch_size=4")


class Replicated(Implementation):
    """Whole states on each rank; only its closed form is asked for."""

    strategy = "replicated"

    @classmethod
    def predicted_memory(cls, workload, parameters, layout, options) -> Mapping:  # type: ignore[no-untyped-def]
        return replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)


class Unknown(Replicated):
    @classmethod
    def predicted_memory(cls, workload, parameters, layout, options) -> None:  # type: ignore[no-untyped-def]
        return None


class Points:
    """Endless samples of four features."""

    fingerprint = "points"

    def __len__(self) -> int:
        return 1000

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), torch.tensor(index % 3)


class ReadsValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


def measured(workload: Workload) -> MemoryReport:
    """Forward and backward alone, into gradients that stay."""
    batch = workload.batch(0)
    recorder = MemoryRecorder(CPU)
    with recorder:
        model = workload.build_model()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(NUM_WARM_UP_STEPS + 1):
            with recorder.step(
                lambda: {"parameters": model.parameters(), "gradients": [p.grad for p in model.parameters()]}
            ):
                for micro_batch in batch.micro_batches:
                    with phase("forward"):
                        loss = workload.loss_sum(model, micro_batch)
                    with phase("backward"):
                        loss.backward()
                    del loss
    return recorder.report()


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp32", ",num_micro_batches=2"),
        ("fp64", ",tied=true"),
        ("bf16", ""),
        ("fp32", ",activation_checkpointing=true"),
    ],
)
def test_a_dry_run_of_gpt_is_exact(precision: str, options: str) -> None:
    workload = models.load(f"gpt:size=tiny,global_batch_size=4{options}")
    workload = replace(workload, precision=PRECISIONS[precision])
    report, run = measured(workload), dry_run(workload, largest_micro_batch(workload, 1))
    assert run.reason is None
    assert run.activation_bytes == report.metrics()["activation_bytes"]
    states = report.at_peak_bytes["parameters"] + report.at_peak_bytes["gradients"]
    assert run.peak_bytes is not None and states + run.peak_bytes == report.peak_allocated_bytes


def test_a_dry_run_touches_no_random_state_and_no_memory() -> None:
    before = torch.get_rng_state()
    run = dry_run(models.load("gpt:size=xl"), 1)
    assert run.activation_bytes is not None and run.activation_bytes > 1 << 30
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_reads_its_values_gets_a_reason() -> None:
    workload = Workload(name="reads", model=lambda: nn.Sequential(nn.Linear(4, 3), ReadsValues()), dataset=Points())
    run = dry_run(workload, 2)
    assert run.activation_bytes is None and run.peak_bytes is None
    assert run.reason is not None and run.reason.startswith("the model does not run without values: ")
    figures = predicted(workload, Replicated, Layout(), {})
    assert figures == {
        "memory.predicted_parameter_bytes": 4 * 15,
        "memory.predicted_gradient_bytes": 4 * 15,
        "memory.predicted_optimizer_bytes": 8 * 15,
    }


def test_states_activations_and_peak_together() -> None:
    figures = predicted(GPT, Replicated, Layout(data=2), {})
    run = dry_run(GPT, 2)
    num_elements = sum(parameter.numel() for parameter in GPT.build_model().parameters())
    assert figures == {
        "memory.predicted_parameter_bytes": 4 * num_elements,
        "memory.predicted_gradient_bytes": 4 * num_elements,
        "memory.predicted_optimizer_bytes": 8 * num_elements,
        "memory.predicted_activation_bytes": run.activation_bytes,
        "memory.predicted_peak_bytes": 16 * num_elements + run.peak_bytes,
    }


def test_activations_of_a_model_that_is_cut_are_not_known() -> None:
    for layout in (Layout(tensor=2), Layout(pipeline=2)):
        assert "memory.predicted_activation_bytes" not in predicted(GPT, Replicated, layout, {})


def test_without_a_closed_form_only_activations_are_known() -> None:
    assert predicted(GPT, Unknown, Layout(), {}).keys() == {"memory.predicted_activation_bytes"}


class HalfCut(Replicated):
    """Two ranks, of which the second keeps three times as much of each of two forwards."""

    @classmethod
    def dry_steps(cls, workload, parameters, layout, options) -> list:  # type: ignore[no-untyped-def]
        return [partial(cls.step, workload, num_kept) for num_kept in (1, 3)]

    @staticmethod
    def step(workload: Workload, num_kept: int, module: nn.Module) -> DryStep:
        assert all(isinstance(parameter, FakeTensor) for parameter in module.parameters())

        def take(batch: Batch) -> None:
            kept = []
            for micro_batch in batch.micro_batches:
                with phase("forward"):
                    kept += [micro_batch.inputs + 1 for _ in range(num_kept)]
                    micro_batch.inputs.repeat(10, 1)  # gone at once
            torch.empty(7)  # no activation

        return DryStep(held_bytes=1000, held=[], batch=workload.batch(0), take=take)


def test_of_dry_steps_the_largest_counts() -> None:
    training = Training(global_batch_size=8, num_micro_batches=2)
    workload = Workload(name="points", model=lambda: nn.Linear(4, 3), dataset=Points(), training=training)
    figures = predicted(workload, HalfCut, Layout(pipeline=2), {})
    one = 4 * 4 * 4  # samples, features, bytes
    assert figures["memory.predicted_activation_bytes"] == 2 * 3 * one
    assert figures["memory.predicted_peak_bytes"] == 1000 + (2 * 3 + 10) * one


def test_the_registry_of_a_model_without_memory_is_the_real_one() -> None:
    for precision in ("fp32", "bf16"):
        workload = replace(models.load("gpt:size=tiny,tied=true"), precision=PRECISIONS[precision])
        assert registry(workload) == logical_parameters(workload.build_model(), workload.decays)


@pytest.mark.parametrize(
    ("global_batch_size", "num_micro_batches", "data_degree", "expected"),
    [(8, 1, 1, 8), (8, 2, 2, 2), (7, 2, 2, 2), (5, 2, 2, 2), (4, 4, 2, 1)],
)
def test_the_largest_micro_batch_is_one_that_exists(
    global_batch_size: int, num_micro_batches: int, data_degree: int, expected: int
) -> None:
    training = Training(global_batch_size=global_batch_size, num_micro_batches=num_micro_batches)
    workload = Workload(name="points", model=nn.Identity, dataset=Points(), training=training)
    assert largest_micro_batch(workload, data_degree) == expected
    batches = [workload.batch(0, data_rank=rank, data_degree=data_degree) for rank in range(data_degree)]
    assert max(len(m.inputs) for batch in batches for m in batch.micro_batches) == expected


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        dry_run(GPT, 0)
