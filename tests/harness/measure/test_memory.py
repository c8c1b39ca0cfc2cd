"""The memory of real training loops on the CPU, to the byte."""

import json
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from queue import Queue
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from harness.implementation import phase
from harness.measure import profiled_threads
from harness.measure.allocations import EmptyProfile
from harness.measure.memory import MAX_TIMELINE_POINTS, NUM_WARM_UP_STEPS, MemoryRecorder, MemoryReport, combine

CPU = torch.device("cpu")
NUM_STEPS = NUM_WARM_UP_STEPS + 2
WIDTH, NUM_ROWS = 64, 32
P = 2 * (WIDTH * WIDTH + WIDTH)  # parameters of the perceptron below


def record(build: Callable[[], tuple[Callable[[], None], Callable[[], dict]]]) -> MemoryReport:
    """The report on `build`, which returns one step and what it lists."""
    recorder = MemoryRecorder(CPU)
    with recorder:
        step, memory_tensors = build()
        for _ in range(NUM_STEPS):
            with recorder.step(memory_tensors):
                step()
    return recorder.report()


def free(num_floats: int) -> None:
    """Allocates and frees at once."""
    torch.empty(num_floats)


def hold(**tensors: Callable[[], list[Tensor]]) -> MemoryReport:
    """The report on steps that allocate 400 bytes and free them, beside tensors that stay."""

    def build() -> tuple[Callable[[], None], Callable[[], dict]]:
        held = {category: make() for category, make in tensors.items()}
        return lambda: free(100), lambda: held

    return record(build)


def perceptron(*, keeps_gradients: bool = True, reverses_lists: bool = False) -> MemoryReport:
    def build() -> tuple[Callable[[], None], Callable[[], dict]]:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        inputs = torch.ones(NUM_ROWS, WIDTH)

        def step() -> None:
            optimizer.zero_grad()
            with phase("forward"):
                loss = model(inputs).square().sum()
            with phase("backward"):
                loss.backward()
            with phase("optimizer"):
                optimizer.step()
                free(100 * P)
            if not keeps_gradients:
                optimizer.zero_grad()

        def memory_tensors() -> dict:
            lists = {
                "parameters": model.parameters(),
                "gradients": [p.grad for p in model.parameters() if p.grad is not None],
                "optimizer_states": [value for state in optimizer.state.values() for value in state.values()],
            }
            return dict(reversed(lists.items())) if reverses_lists else lists

        return step, memory_tensors

    return record(build)


@contextmanager
def mapped(num_floats: int) -> Iterator[Tensor]:
    pages = mmap.mmap(-1, num_floats * 4)
    yield torch.frombuffer(pages, dtype=torch.float32)


@pytest.fixture(scope="module")
def adam() -> MemoryReport:
    return perceptron()


def test_adam_on_a_perceptron(adam: MemoryReport) -> None:
    metrics = adam.metrics()
    step_counters = 4 * 4  # a float for each of the four parameters
    row = 4 * NUM_ROWS * WIDTH
    saved = 3 * row  # what GELU, the second layer and the square read in backward
    assert metrics["parameter_bytes"] == 4 * P
    assert metrics["gradient_bytes"] == 4 * P
    assert metrics["optimizer_bytes"] == 8 * P + step_counters
    assert metrics["activation_bytes"] == saved + 4  # and the loss
    held = 16 * P + step_counters + row  # and the inputs
    assert metrics["steady_allocated_bytes"] == held
    assert metrics["peak_optimizer_bytes"] == held + 400 * P + 4  # the transient, and the loss
    assert metrics["peak_allocated_bytes"] == metrics["peak_optimizer_bytes"]
    assert metrics["peak_forward_bytes"] == held - 4 * P + saved + row + 4  # gradients are not there yet
    assert metrics["peak_forward_bytes"] < metrics["peak_backward_bytes"] < metrics["peak_optimizer_bytes"]
    assert "peak_reduce_bytes" not in metrics
    assert metrics["mapped_bytes"] == 0
    assert metrics["peak_resident_bytes"] > metrics["peak_allocated_bytes"]
    assert adam.at_peak_bytes == {
        "parameters": 4 * P,
        "gradients": 4 * P,
        "optimizer_states": 8 * P + step_counters,
        "activations": 4,
        "other": 400 * P + row,
    }


def test_categories_at_the_peak_sum_to_it(adam: MemoryReport) -> None:
    assert sum(adam.at_peak_bytes.values()) == adam.peak_allocated_bytes


def test_warm_up_is_reported_apart() -> None:
    sizes = iter([100, 300, 50, 70])
    report = record(lambda: (lambda: free(next(sizes)), dict))
    assert report.first_step_peak_allocated_bytes == 400
    assert report.warm_up_peak_allocated_bytes == 1200
    assert report.peak_allocated_bytes == 280
    assert report.steady_allocated_bytes == 0


def test_gradients_freed_within_the_step_are_gradients_still(adam: MemoryReport) -> None:
    report = perceptron(keeps_gradients=False)
    assert report.metrics()["gradient_bytes"] == 4 * P
    assert report.at_peak_bytes["gradients"] == 4 * P
    assert report.steady_allocated_bytes == adam.steady_allocated_bytes - 4 * P


def test_the_report_depends_on_no_order(adam: MemoryReport) -> None:
    """Not on that of the lists, and not on what ran before in this process and is alive still."""
    kept = torch.ones(12345)
    first, again = adam, perceptron(reverses_lists=True)
    del kept
    assert {name: value for name, value in first.metrics().items() if name != "peak_resident_bytes"} == {
        name: value for name, value in again.metrics().items() if name != "peak_resident_bytes"
    }


def test_known_tensors_exactly() -> None:
    report = hold(parameters=lambda: [torch.zeros(10), torch.zeros(7, dtype=torch.int16)])
    assert report.metrics()["parameter_bytes"] == 40 + 14
    assert report.steady_allocated_bytes == 54
    assert report.peak_allocated_bytes == 54 + 400
    assert report.at_peak_bytes["other"] == 400


def test_what_is_alive_between_steps_only_is_not_their_peak() -> None:
    recorder = MemoryRecorder(CPU)
    with recorder:
        for num_floats in range(1, NUM_STEPS + 1):
            free(1000)
            with recorder.step(dict):
                free(num_floats)
    report = recorder.report()
    assert report.peak_allocated_bytes == report.at_peak_bytes["other"] == 4 * NUM_STEPS
    assert min(report.at_peak_bytes.values()) == 0


def test_views_count_their_storage_once() -> None:
    def parts() -> list[Tensor]:
        flat = torch.zeros(100)
        return [flat[:10], flat[10:90].view(8, 10), flat]

    report = hold(gradients=parts, communication_buffers=list)
    assert report.metrics()["gradient_bytes"] == 400
    assert report.steady_allocated_bytes == 400


def test_a_mapping_counts_once_and_in_every_figure() -> None:
    with mapped(1 << 20) as tensor:
        report = hold(gradients=lambda: [tensor, tensor[5:]], communication_buffers=lambda: [tensor])
    num_bytes = 4 << 20
    assert report.mapped_bytes == report.metrics()["gradient_bytes"] == num_bytes
    assert report.metrics()["communication_buffer_bytes"] == 0
    assert report.steady_allocated_bytes == num_bytes
    assert report.peak_allocated_bytes == num_bytes + 400 == sum(report.at_peak_bytes.values())


def test_the_timeline_keeps_the_peak_and_is_short(adam: MemoryReport) -> None:
    assert 0 < len(adam.timeline) <= MAX_TIMELINE_POINTS
    assert max(num_bytes for _, num_bytes in adam.timeline) == adam.peak_allocated_bytes
    assert [seconds for seconds, _ in adam.timeline] == sorted({seconds for seconds, _ in adam.timeline})


def test_a_report_survives_json(adam: MemoryReport) -> None:
    assert MemoryReport(**json.loads(json.dumps(asdict(adam)))).metrics() == adam.metrics()


def test_ranks_combine_into_the_largest_of_each() -> None:
    small = hold(parameters=lambda: [torch.zeros(10)], gradients=lambda: [torch.zeros(30)])
    large = hold(parameters=lambda: [torch.zeros(20)], optimizer_states=lambda: [torch.zeros(50)])
    for ranks in ([small, large], [large, small]):
        figures = combine(ranks)
        assert figures["memory.parameter_bytes"] == 80
        assert figures["memory.gradient_bytes"] == 120
        assert figures["memory.optimizer_bytes"] == 200
        assert figures["memory.peak_allocated_bytes.max_rank"] == 280 + 400
        at_peak = [value for name, value in figures.items() if name.startswith("memory.at_peak.")]
        assert sum(at_peak) == 280 + 400
    with pytest.raises(ValueError, match="at least one rank, got none"):
        combine([])


def test_nothing_recorded_is_an_error() -> None:
    recorder = MemoryRecorder(CPU)
    with pytest.raises(EmptyProfile), recorder:
        pass
    with pytest.raises(ValueError, match="belongs after"):
        recorder.report()


def test_too_few_steps_are_an_error() -> None:
    recorder = MemoryRecorder(CPU)
    with recorder:
        kept = torch.zeros(10)
        with recorder.step(lambda: {"parameters": [kept]}):
            pass
    with pytest.raises(ValueError, match="at least 3 steps, the first 2 of them for warm-up, got 1"):
        recorder.report()


def test_a_step_outside_the_recording_is_an_error() -> None:
    recorder = MemoryRecorder(CPU)
    with pytest.raises(ValueError, match="inside"), recorder.step(dict):
        pass


def test_an_error_in_a_step_comes_through_and_frees_the_profiler() -> None:
    recorder = MemoryRecorder(CPU)
    with pytest.raises(ZeroDivisionError), recorder, recorder.step(dict):
        _ = 1 / 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as next_one:
        torch.empty(10)
    assert next_one.events()


class _Elsewhere:
    """A thread of Python's that carries out one call after another."""

    def __init__(self) -> None:
        self._calls: Queue[Callable[[], Tensor] | None] = Queue()
        self._results: Queue[Tensor] = Queue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._results.put(call())
            del call

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        self._calls.put(call)
        return self._results.get()

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join()


def thread_report(elsewhere: Callable[[], _Elsewhere]) -> MemoryReport:
    """The report on steps whose forward another thread computes: it keeps 400 bytes for backward."""
    workers: list[_Elsewhere] = []

    def build() -> tuple[Callable[[], None], Callable[[], dict]]:
        worker = elsewhere()
        workers.append(worker)
        weight = torch.ones(100, requires_grad=True)

        def step() -> None:
            weight.grad = None
            with phase("forward"):
                loss = worker.run(lambda: weight.exp().sum())
            with phase("backward"):
                loss.backward()

        return step, lambda: {"parameters": [weight], "gradients": [weight.grad]}

    try:
        return record(build)
    finally:
        workers[0].end()


def test_what_another_thread_keeps_for_backward_is_an_activation() -> None:
    report = thread_report(_Elsewhere)
    assert report.largest_bytes["activations"] == 404  # and the loss
    assert report.largest_bytes["gradients"] == 400


def test_a_thread_that_was_there_before_is_not_heard() -> None:
    """It could not be told from one that belongs to somebody else."""
    worker = _Elsewhere()
    assert thread_report(lambda: worker).largest_bytes["activations"] == 0


def test_a_profile_after_one_with_threads_hears_everything_once() -> None:
    untouched = perceptron()
    thread_report(_Elsewhere)
    assert threading.getprofile() is None
    assert perceptron() == replace(untouched, timeline=ANY, peak_resident_bytes=ANY)


def test_a_thread_that_cannot_be_heard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiled_threads, "_JOIN", "no_such_function")
    with pytest.raises(RuntimeError, match=r"does not profile other threads: AttributeError: .*no_such_function"):
        thread_report(_Elsewhere)
