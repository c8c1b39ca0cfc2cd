import pytest
import torch

from harness.measure.timing import NothingMeasured, model_flops_utilisation, slowest_rank, time_metrics


def test_the_slowest_rank_is_the_step() -> None:
    assert slowest_rank([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]


@pytest.mark.parametrize("nothing", [[], [[]], [[], []], [[1.0], []]])
def test_no_step_is_no_measurement(nothing: list[list[float]]) -> None:
    with pytest.raises(NothingMeasured, match="expected at least one on every rank"):
        time_metrics(nothing, [0.0], [8], "tokens")


def test_ranks_that_timed_unequal_numbers_of_steps_are_no_measurement() -> None:
    with pytest.raises(ValueError, match="zip"):
        slowest_rank([[1.0, 2.0], [1.0]])


def test_metrics_by_hand() -> None:
    # slowest: 2, 4, 3; median 3. Tokens: 12 on average.
    metrics = time_metrics([[2.0, 1.0, 3.0], [1.0, 4.0, 1.0]], [6.0, 3.0], [10, 12, 14], "tokens")
    assert metrics == {
        "step.median_seconds": 3.0,
        "step.min_seconds": 2.0,
        "step.max_seconds": 4.0,
        "step.num_samples": 3.0,
        "cpu.seconds_per_step": 3.0,
        "throughput.tokens_per_second": 4.0,
    }
    assert "throughput.samples_per_second" in time_metrics([[1.0]], [1.0], [8], "samples")


def test_model_flops_utilisation() -> None:
    # 1e6 tokens/s of 6e9 FLOP on 8 devices of 989e12 each.
    expected = 1e6 * 6e9 / (8 * 989e12)
    assert model_flops_utilisation(1e6, 6e9, 8, "NVIDIA H100 80GB HBM3", torch.bfloat16) == pytest.approx(expected)
    # Another card of the same generation is slower, and a processor has no such peak.
    for unknown in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "Intel(R) Xeon(R)", "None"):
        assert model_flops_utilisation(1e6, 6e9, 8, unknown, torch.bfloat16) is None
    assert model_flops_utilisation(1e6, 6e9, 8, "NVIDIA H200", torch.float16) is None
