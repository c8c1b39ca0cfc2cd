"""The pipeline instrument: what it records of real work, and what it makes of records written by hand."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch

from harness.measure.pipeline import PipelineRecorder, RecordedAction, Step, replayed_bubbles, summarise
from harness.pipeline_marks import Action, pipeline_action

CPU = torch.device("cpu")
SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def table(text: str, **seconds: float) -> list[dict[Action, float]]:
    """A rank a line; what each action takes goes by its kind."""
    costs = {**SECONDS, **seconds}
    return [{Action.parse(word): costs[Action.parse(word).kind] for word in line.split()} for line in text.split("/")]


@pytest.mark.parametrize(
    ("text", "bubbles"),
    [
        ("0F0 0F1 0B0 0B1", [0]),
        ("0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1", [1 / 3, 1 / 3]),  # 9 units long, 6 of work
        ("0F0 0F1 0I0 0W0 0I1 0W1 / 1F0 1I0 1F1 1I1 1W0 1W1", [1 / 7, 1 / 7]),  # 7 units long
        ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 / 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1", [1 / 5, 1 / 5]),  # 15 long, 12 of work
        ("0F0 0B0 / 1F0 1B0 / 2F0 2B0", [2 / 3, 2 / 3, 2 / 3]),
    ],
)
def test_schedules_are_played_again_by_their_own_clock(text: str, bubbles: list[float]) -> None:
    assert replayed_bubbles(table(text)) == pytest.approx(bubbles)


def test_a_slow_stage_makes_the_others_wait() -> None:
    ranks = table("0F0 0B0 / 1F0 1B0")
    ranks[1][Action.parse("1F0")] = 6.0
    assert replayed_bubbles(ranks) == pytest.approx([1 - 3 / 11, 1 - 8 / 11])


def test_what_cannot_have_happened_is_not_played() -> None:
    with pytest.raises(ValueError, match=re.escape("every rank waits, at 0B0, 1F1")):
        replayed_bubbles(table("0F0 0B0 0F1 0B1 / 1F0 1F1 1B0 1B1"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As ranks compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_computing_is_told_from_waiting() -> None:
    recorder, held = PipelineRecorder(CPU), []
    with pipeline_action("0F9", lambda: 1 // 0):
        pass
    for _ in range(2):
        with recorder.step():
            time.sleep(0.02)
            with pipeline_action("0F0", lambda: len(held)):
                spin(0.01)
                time.sleep(0.03)
                held.append(0)
            with pipeline_action("0B0", lambda: len(held)):
                held.clear()
    first, second = recorder.steps
    assert [(recorded.action, recorded.in_flight) for recorded in second] == [("0F0", 1), ("0B0", 0)]
    forward = first[0]
    assert 0.01 <= forward.cpu_seconds < 0.03
    assert forward.end - forward.begin >= 0.04
    assert first[0].end <= first[1].begin <= first[1].end < second[0].begin - 0.01


def test_backward_is_computed_by_the_thread_whose_time_counts(one_thread: None) -> None:
    weight = torch.ones(600, 600, requires_grad=True)
    loss = (weight @ weight).sum()
    recorder, before = PipelineRecorder(CPU), time.process_time()
    with recorder.step(), pipeline_action("0B0", int):
        loss.backward()
    of_process = time.process_time() - before
    (recorded,) = recorder.steps[0]
    assert 0.5 * of_process < recorded.cpu_seconds <= of_process


def recorded(*actions: tuple[str, float, float, float, int]) -> Step:
    return [
        RecordedAction(action=action, begin=begin, end=end, cpu_seconds=cpu_seconds, in_flight=in_flight)
        for action, begin, end, cpu_seconds, in_flight in actions
    ]


FIRST = recorded(("0F0", 10.0, 11.0, 1.0, 1), ("0B0", 17.0, 19.0, 2.0, 0))
LAST = recorded(("1F0", 12.0, 15.0, 1.0, 1), ("1B0", 15.0, 17.0, 2.0, 0))


def test_a_bubble_is_what_a_rank_does_not_compute_of_its_pipelines_step() -> None:
    """The wall shows 9 seconds, of which the last rank lost 2 to a processor that others had: replayed there are 6."""
    figures = summarise([[FIRST] * 3, [LAST] * 3], [(0, 1)])
    assert figures is not None
    assert figures.bubble_ratios == pytest.approx((1 - 3 / 9, 1 - 5 / 9))
    assert figures.replayed_bubble_ratios == pytest.approx((0.5, 0.5))
    assert figures.in_flight == (1, 1)
    assert figures.metrics() == pytest.approx(
        {
            "pipeline.bubble_ratio": 1 - 4 / 9,
            "pipeline.replayed_bubble_ratio": 0.5,
            "pipeline.in_flight_micro_batches": 1.0,
        }
    )
    assert json.loads(json.dumps(asdict(figures)))["in_flight"] == [1, 1]


def test_each_pipeline_has_a_clock_of_its_own() -> None:
    late = [
        RecordedAction(**{**asdict(each), "begin": each.begin + 100, "end": each.end + 100, "in_flight": 3})
        for each in LAST
    ]
    far = [RecordedAction(**{**asdict(each), "begin": each.begin + 100, "end": each.end + 100}) for each in FIRST]
    figures = summarise([[FIRST], [far], [LAST], [late]], [(0, 2), (1, 3)])
    assert figures is not None
    assert figures.bubble_ratios == pytest.approx((1 - 3 / 9, 1 - 3 / 9, 1 - 5 / 9, 1 - 5 / 9))
    assert figures.in_flight == (1, 3)


def test_who_marks_nothing_has_no_figures_and_half_a_pipeline_is_none() -> None:
    assert summarise([[[]], [[]]], [(0, 1)]) is None
    with pytest.raises(ValueError, match="expected actions in every step of each of 2 ranks, got none on rank 1"):
        summarise([[FIRST], [[]]], [(0, 1)])
    with pytest.raises(ValueError, match="expected the same actions in each step"):
        summarise([[FIRST, FIRST[:1]], [LAST, LAST]], [(0, 1)])
