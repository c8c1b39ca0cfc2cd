"""How many latencies a step waits for, measured on real ranks whose waiting is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from harness.case import Case, Measurement
from harness.launch.local import LocalLaunch
from harness.layout import Layout
from harness.measure.communication import Event, StepRecord
from harness.measured_case import MeasuredCase
from harness.references import References

TOYS = Path(__file__).with_name("measure") / "latency_toys.py"
DELAY = 0.1  # seconds


def toy(name: str) -> Case:
    return Case(
        workload="awkward:kind=unequal_tokens",
        implementation=f"{TOYS}:{name}",
        layout=Layout(data=2),
        measurement=Measurement(communication_steps=3),
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLaunch]:
    case = toy("ThreeInTurn").to_json()
    with LocalLaunch(case, 2, tmp_path_factory.mktemp("toys"), instrumented=True) as launch:
        yield launch


def measured(ranks: LocalLaunch, name: str) -> list[dict[str, list[float]] | None]:
    ranks.command("adopt", case=toy(name).to_json())
    ranks.command("build")
    return ranks.command("measure_latency", num_steps=2, delay_seconds=DELAY)


@pytest.mark.parametrize(("name", "num_latencies"), [("ThreeInTurn", 3), ("FiveAtOnce", 1), ("AcrossSteps", 1)])
def test_latencies_are_counted_as_they_are_waited_for(ranks: LocalLaunch, name: str, num_latencies: int) -> None:
    for answer in measured(ranks, name):
        assert answer is not None
        assert len(answer["real_seconds"]) == len(answer["delayed_seconds"]) == 2
        found = min(answer["delayed_seconds"]) / DELAY  # a busy machine adds to it, and takes nothing away
        assert num_latencies - 0.1 < found < num_latencies + 1.5, answer
        assert min(answer["real_seconds"]) < min(answer["delayed_seconds"])


def test_a_transport_that_goes_on_without_its_delay_is_found_out(ranks: LocalLaunch) -> None:
    assert measured(ranks, "PastTheBackend") == [None, None]


class Answering:
    """In the place of ranks: two that take 0.5 and 0.4 s for a real step, and 0.1 s more for each of 3 latencies."""

    def __init__(self, *, can_delay: bool) -> None:
        self.can_delay = can_delay
        self.asked: list[dict[str, Any]] = []

    def command(self, name: str, on_phase: object, **arguments: Any) -> list[dict[str, list[float]] | None]:
        assert name == "measure_latency"
        self.asked.append(arguments)
        answers = [{"real_seconds": [s] * 3, "delayed_seconds": [s + 0.3] * 3} for s in (0.5, 0.4)]
        return [answers[0], answers[1] if self.can_delay else None]


@pytest.mark.parametrize("can_delay", [True, False])
def test_a_case_tells_its_latencies_or_leaves_them_out(can_delay: bool, tmp_path: Path) -> None:
    answering = Answering(can_delay=can_delay)
    case = MeasuredCase(
        case=toy("ThreeInTurn"),
        scratch=tmp_path,
        logs=tmp_path,
        references=cast(References, None),
        on_start=lambda: None,
        on_phase=lambda *_: None,
        launch=cast(LocalLaunch, answering),
    )
    event = Event(
        operation="all_reduce",
        ranks=(0, 1),
        dtype="float32",
        payload_bytes=4,
        wire_bytes=4,
        transport="gloo",
        launched=0.0,
        returned=0.0,
        completed=0.1,
        blocked=(),
    )
    record = StepRecord(start=0.0, end=0.5, events=(event,))
    answers = [{"records": [record], "real_seconds": [0.5], "null_seconds": [0.4]} for _ in range(2)]
    case._take_communication(answers)
    assert answering.asked == [{"num_steps": 3, "delay_seconds": 0.1}]  # a quarter of the null step
    assert case.metrics["communication.calls_per_step"] == 1.0
    if can_delay:
        assert case.metrics["communication.exposed_latencies_per_step"] == pytest.approx(3.0)
        assert case.metrics["communication.delay_seconds"] == 0.1
        assert case.samples["instrumented_undelayed_seconds"] == [0.5] * 3
        assert case.samples["instrumented_delayed_seconds"] == [0.8] * 3
    else:
        assert "communication.exposed_latencies_per_step" not in case.metrics
        assert "communication.delay_seconds" not in case.metrics
