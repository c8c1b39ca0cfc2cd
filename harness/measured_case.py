"""One case under measurement: its launches in order, and the figures and the verdict made of what the ranks answer.

Two launches: the first is clean and is held against the reference, then timed; the second carries the instruments for
memory and communication and is timed by nobody.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness import implementation, models, node_bytes, traffic
from harness.case import Case
from harness.code_change import num_changed_lines
from harness.compared_strategy import compared_as, ours_planned
from harness.engines import Engine, Local, Start
from harness.launch import emulated
from harness.launch.emulated import EmulatedNodes
from harness.launch.failure import LaunchFailed
from harness.launch.timeouts import hard_deadline_seconds
from harness.launch.watched import Launch
from harness.measure import communication, links, memory, pipeline, straggler
from harness.measure.predicted_memory import registry
from harness.measure.predictions import predictions
from harness.measure.timing import model_flops_utilisation, time_metrics
from harness.rank_records import assemble
from harness.references import References
from harness.result import Parity, Result, Status
from harness.trajectory import Trajectory
from harness.workload import Workload, in_precision

OnPhase = Callable[[str, int, int], None]
_INSTRUMENTED_FACTOR = 10  # the most by which instruments are expected to stretch a step


@dataclass(kw_only=True)
class MeasuredCase:
    """Collects what is known of one case while its group runs."""

    case: Case
    scratch: Path  # for weights and tensors; goes when the suite is done
    logs: Path
    references: References
    on_start: Callable[[], None]
    on_phase: OnPhase
    beside: Sequence[Case] = ()  # with which it is compared
    device: str = "cpu"
    engine: Engine = field(default_factory=Local)
    canary: Mapping[str, float] = field(default_factory=dict)  # of this session, see harness.canary
    started: float = field(default_factory=time.time)
    seconds: float = 0.0
    launch: Launch | None = None
    nodes: EmulatedNodes | None = None
    expected_build_seconds: float = math.inf  # as the clean launch took to start and build
    expected_step_seconds: float = math.inf  # as it took in its warm-up
    failure: LaunchFailed | None = None
    status: Status = "ok"
    reason: str | None = None
    strategy: str = ""
    comparable_strategies: tuple[str, ...] = ()
    unpredicted: dict[str, str] = field(default_factory=dict)
    other_work: str | None = None
    beyond_the_textbook: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)
    parity: Parity | None = None
    trajectory: Trajectory | None = None
    drifted: list[int] = field(default_factory=list)  # ranks unlike the first of their data group after the timed steps

    def probe(self) -> None:
        """Finds out, before any process starts, whether the case can run here at all: if not, its status says so."""
        try:
            kind = implementation.load(self.case.implementation)
            workload = in_precision(models.load(self.case.workload), self.case.precision)
        except Exception as error:  # whatever a third-party library raises while it is imported
            if not _is_of_a_library(error):
                raise
            self.status, self.reason = "unavailable", f"{type(error).__name__}: {error}".splitlines()[0]
            return
        self.strategy = kind.strategy_of(self.case.options)
        self.comparable_strategies = kind.comparable_strategies(self.case.options)
        if reason := kind.unavailable():
            self.status, self.reason = "unavailable", reason
        elif reason := kind.unsupported(workload, self.case.layout, torch.device(self.device), self.case.options):
            self.status, self.reason = "unsupported", reason
        elif reason := self.engine.unavailable(self.case) or self._unprepared(kind):
            self.status, self.reason = "unavailable", reason
        else:
            self._tell_work(kind, workload)

    def _tell_work(self, kind: type[implementation.Implementation], workload: Workload) -> None:
        """What its options change in the work and in what is sent, and how far our use of a peer is from plain
        training."""
        if self.case.role != "floor":
            self.other_work = kind.other_work(workload, self.case.layout, self.case.options)
            self.beyond_the_textbook = kind.beyond_the_textbook(torch.device(self.device), self.case.options)
        if self.case.role == "peer" and (num_lines := num_changed_lines(kind)) is not None:
            # Ours are libraries themselves, not uses of one.
            self.metrics["code.changed_lines"] = num_lines

    def _unprepared(self, kind: type[implementation.Implementation]) -> str | None:
        """Prepares this machine, outside every deadline; the first line of what went wrong, or None."""
        try:
            kind.prepare(self.case.options)
        except Exception as error:  # whatever a library's compiler or loader raises
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    def start(self) -> None:
        """The clean launch, as far as its first timed window: built, held against the reference, warmed up."""
        measurement = self.case.measurement
        if self._is_emulated:
            self.nodes = EmulatedNodes(self.case.placed)
        began = time.monotonic()
        self.launch = self._launch("timed", instrumented=False)
        if self.nodes is not None and self.case.placed.num_nodes > 1:
            self._measure_links(self.nodes)
        self.environment = self._command("environment")[0]
        facts = self._command("build")[0]
        self.expected_build_seconds = time.monotonic() - began
        # Only now is it known which libraries the rank has imported.
        self.environment = {**self._command("environment")[0], "facts": facts, "emulated": self._is_emulated}
        if self.canary:
            self.environment["canary"] = dict(self.canary)
        if measurement.parity_steps and self.case.role != "floor":
            tensors = self.scratch / f"{self.case.id}.pt"
            records = self._command("parity", num_steps=measurement.parity_steps, path=str(tensors))
            self.trajectory = assemble(records, tensors, self.case.layout)
            tensors.unlink()
        if measurement.timed_steps:
            began = time.monotonic()
            num_steps = self._command("warm_up", num_steps=measurement.warm_up_steps)[0]
            if num_steps:
                self.expected_step_seconds = (time.monotonic() - began) / num_steps
            self.metrics["step.num_warm_up"] = num_steps
            self.samples |= {"step_seconds": [[] for _ in range(self.case.world_size)], "cpu_seconds": [], "tokens": []}
            self.samples["fixed_work_seconds"] = []
            self.samples["steps_per_round"] = measurement.timed_steps

    def time_one_round(self, number: int) -> None:
        """One window of timed steps: round `number`, from 0."""
        assert self.launch is not None
        counts_bytes = self.nodes is not None and self.case.placed.num_nodes > 1
        sent_before = self.nodes.sent_bytes() if self.nodes and counts_bytes else []
        num_steps = self.case.measurement.timed_steps
        within_seconds = hard_deadline_seconds(num_steps * self.expected_step_seconds)
        answers = self._command(
            "time_steps",
            within_seconds=within_seconds,
            num_steps=num_steps,
            number=number,
            num_rounds=self.case.measurement.rounds,
        )
        if self.nodes is not None and counts_bytes:
            sent = [after - before for after, before in zip(self.nodes.sent_bytes(), sent_before, strict=True)]
            self.samples.setdefault("node_wire_bytes", []).append(sent)
        for seconds, answer in zip(self.samples["step_seconds"], answers, strict=True):
            seconds.extend(answer["step_seconds"])
        self.samples["cpu_seconds"].append([answer["cpu_seconds"] for answer in answers])
        self.samples["tokens"] += answers[0]["global_num_tokens"]
        self.samples["fixed_work_seconds"].append([answer["fixed_work_seconds"] for answer in answers])

    def finish_timing(self) -> None:
        """Ends the clean launch, once its replicas have been compared for the last time, and derives the figures of
        time."""
        assert self.launch is not None
        if self.trajectory is not None:
            checksums = self._command("replica_checksum")
            groups = self.case.layout.groups("data")
            self.drifted = [rank for group in groups for rank in group if checksums[rank] != checksums[group[0]]]
        self.launch.close()
        self.launch = None
        if not self.case.measurement.timed_steps:
            return
        if "node_wire_bytes" in self.samples:
            of_nodes = [sum(rounds) for rounds in zip(*self.samples["node_wire_bytes"], strict=True)]
            num_steps = self.case.measurement.timed_steps * len(self.samples["node_wire_bytes"])
            self.metrics[node_bytes.SENT] = max(of_nodes) / num_steps
            self._predict_node_bytes()
        workload = models.load(self.case.workload)
        cpu_seconds = [sum(of_rank) for of_rank in zip(*self.samples["cpu_seconds"], strict=True)]
        self.metrics |= time_metrics(self.samples["step_seconds"], cpu_seconds, self.samples["tokens"], workload.unit)
        if rank_speeds := straggler.speeds(self.samples["fixed_work_seconds"]):
            self.metrics["rank.slowest_speed_ratio"] = min(rank_speeds)
        if workload.flops_per_unit is not None:
            utilisation = model_flops_utilisation(
                self.metrics[f"throughput.{workload.unit}_per_second"],
                workload.flops_per_unit,
                self.case.world_size,
                str(self.environment["device"]["name"]),
                in_precision(workload, self.case.precision).precision.compute,
            )
            if utilisation is not None:
                self.metrics["throughput.mfu"] = utilisation

    def instrument(self) -> None:
        """The instrumented launch: memory from before the build, then communication, then the pipeline."""
        measurement = self.case.measurement
        pipeline_steps = measurement.pipeline_steps if self.case.layout.pipeline > 1 else 0
        if not (measurement.memory_steps or measurement.communication_steps or pipeline_steps):
            return
        with self._launch("instrumented", instrumented=True) as self.launch:
            num_steps = memory.NUM_WARM_UP_STEPS + measurement.memory_steps
            reports = self._command(
                "build_and_measure_memory",
                within_seconds=self._with_instruments(num_steps, self.expected_build_seconds),
                num_steps=measurement.memory_steps,
            )
            if measurement.memory_steps:
                self.metrics |= memory.combine(reports)
                self.samples["memory"] = [asdict(report) for report in reports]
            if measurement.communication_steps:
                # Recorded, real and null.
                within = self._with_instruments(3 * measurement.communication_steps)
                answers = self._command(
                    "measure_communication", within_seconds=within, num_steps=measurement.communication_steps
                )
                self._take_communication(answers)
            if pipeline_steps:
                within = self._with_instruments(1 + pipeline_steps)
                self._take_pipeline(self._command("measure_pipeline", within_seconds=within, num_steps=pipeline_steps))
        self.launch = None
        self._predict()

    def _with_instruments(self, num_steps: int, other_seconds: float = 0.0) -> float:
        """The hard deadline of some steps that instruments, the memory's above all, make longer."""
        steps_seconds = _INSTRUMENTED_FACTOR * num_steps * self.expected_step_seconds if num_steps else 0.0
        return hard_deadline_seconds(steps_seconds + other_seconds)

    def _take_communication(self, answers: list[dict[str, Any]]) -> None:
        if self.case.world_size == 1 or self.case.role == "floor":
            return
        self.metrics |= communication.summarise([answer["records"] for answer in answers])
        real, null = (_slowest(answers, f"{kind}_seconds") for kind in ("real", "null"))
        self.metrics |= communication.exposed(real, null)
        self.samples["communication"] = [[record.to_json() for record in answer["records"]] for answer in answers]
        self.samples |= {"instrumented_real_seconds": real, "instrumented_null_seconds": null}
        if not self._is_emulated:  # the link is what it was asked to be, not to be made longer still
            self._measure_latency(null)

    def _measure_latency(self, null_seconds: list[float]) -> None:
        """How many latencies a step waits for; left out where the transport cannot be delayed."""
        delay = communication.delay_for(null_seconds, self.metrics["communication.calls_per_step"])
        answers = self._command(
            "measure_latency", num_steps=self.case.measurement.communication_steps, delay_seconds=delay
        )
        if all(answers):
            real, delayed = (_slowest(answers, f"{kind}_seconds") for kind in ("real", "delayed"))
            self.metrics |= communication.exposed_latencies(real, delayed, delay)
            self.samples |= {"instrumented_undelayed_seconds": real, "instrumented_delayed_seconds": delayed}

    def _take_pipeline(self, steps: list[list[pipeline.Step]]) -> None:
        figures = pipeline.summarise(steps, self.case.layout.groups("pipeline"))
        if figures is not None:
            self.metrics |= figures.metrics()
            actions = [[[asdict(recorded) for recorded in step] for step in of_rank] for of_rank in steps]
            self.samples["pipeline"] = {**asdict(figures), "actions": actions}

    def _predict(self) -> None:
        """The closed forms beside what was measured."""
        kind = implementation.load(self.case.implementation)
        workload = in_precision(models.load(self.case.workload), self.case.precision)
        device = torch.device(self.device)
        made = predictions(
            workload,
            kind,
            self.case.layout,
            self.case.options,
            device,
            is_floor=self.case.role == "floor",
            compared_as=self._compared_as(),
        )
        self.metrics |= made.figures
        self.unpredicted = dict(made.missing)
        foreseen = kind.predicted_pipeline(workload, self.case.layout, self.case.options)
        if foreseen is not None:
            self.metrics["pipeline.predicted_bubble_ratio"] = foreseen.bubble_ratio
            self.metrics["pipeline.predicted_in_flight_micro_batches"] = float(max(foreseen.in_flight))
            self.samples.setdefault("pipeline", {})["predicted_in_flight"] = foreseen.in_flight

    def _compared_as(self) -> str:
        strategies = (self.strategy, *self.comparable_strategies)
        is_free = len(set(strategies)) > 1  # else there is nothing to choose from, nor to load
        return compared_as(self.case, strategies, ours_planned(self.beside) if is_free else ())

    def _predict_node_bytes(self) -> None:
        """What the node that sends most puts on its link, by the closed form."""
        case = self.case
        kind = implementation.load(case.implementation)
        workload = in_precision(models.load(case.workload), case.precision)
        sent = kind.predicted_traffic(workload, registry(workload), case.layout, case.seats, case.options)
        if sent is not None and case.role != "floor":
            leaving = max(traffic.leaving_bytes(sent, case.seats))
            self.metrics[node_bytes.FORESEEN] = float(leaving)

    def fail(self, failure: LaunchFailed) -> None:
        """Keeps what went wrong; the case takes part in nothing more."""
        self.failure, self.status, self.reason = failure, failure.status, failure.reason
        self.abandon()

    def abandon(self) -> None:
        """Ends whatever still runs."""
        if self.launch is not None:
            self.launch.kill()
            self.launch = None
        if self.nodes is not None:
            self.nodes.close()
            self.nodes = None

    def result(self, suite: str, suite_run: str, num_suite_cases: int = 0) -> Result:
        """What became of it. A figure that is not finite is no measurement: it is left out, and the case has failed."""
        finite = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        if self.status == "ok" and (lost := sorted(self.metrics.keys() - finite.keys())):
            self.status, self.reason = "failed", f"not a finite number: {', '.join(lost)}"
        return Result(
            case=self.case,
            status=self.status,
            reason=self.reason,
            environment=self.environment,
            metrics=finite,
            parity=self.parity,
            samples=self.samples,
            culprit=None if self.failure is None else self.failure.culprit,
            traceback=None if self.failure is None else self.failure.traceback,
            strategy=self.strategy,
            comparable_strategies=self.comparable_strategies,
            unpredicted=self.unpredicted,
            other_work=self.other_work,
            beyond_the_textbook=self.beyond_the_textbook,
            suite=suite,
            suite_run=suite_run,
            num_suite_cases=num_suite_cases,
            started=self.started,
            duration_seconds=self.seconds,
        )

    @property
    def _is_emulated(self) -> bool:
        """Whether it runs on emulated nodes: on several, or on the one that it names, as it stands beside others on
        several and shall differ from them by the links alone."""
        placed = self.case.placed
        if not self.engine.emulates or placed.num_nodes > 1:
            return self.engine.emulates
        return self.case.topology is not None and self.case.world_size > 1 and emulated.unavailable(placed) is None

    def _measure_links(self, nodes: EmulatedNodes) -> None:
        """Before anything else: the links beside what the topology says of them. LaunchFailed where they differ."""
        topology = self.case.placed
        payload = links.payload_bytes(topology)
        self.on_phase("measuring links", 0, 1)
        before = nodes.sent_bytes()
        answers = self._command("all_reduce_seconds", num_bytes=payload, num_repeats=links.NUM_REPEATS)
        sent = [after - start for after, start in zip(nodes.sent_bytes(), before, strict=True)]
        # The one that does not count is among the bytes.
        sent = [num_bytes * links.NUM_REPEATS // (links.NUM_REPEATS + 1) for num_bytes in sent]
        mbits = links.carried_mbits([max(of_ranks) for of_ranks in zip(*answers, strict=True)], sent)
        far_apart = (0, next(rank for rank, node in enumerate(self.case.seats.node_of_rank) if node == 1))
        trips = self._command("round_trip_seconds", ranks=far_apart, num_repeats=links.NUM_ROUND_TRIPS)
        delay = links.one_way_ms(trips[0])
        self.metrics |= {"topology.measured_link_mbits": mbits, "topology.measured_delay_ms": delay}
        self.metrics["topology.wire_bytes_per_payload"] = max(sent) / links.NUM_REPEATS / payload
        if reason := links.mismatch(topology, mbits, delay):
            raise LaunchFailed("topology mismatch", reason)

    def _launch(self, name: str, *, instrumented: bool) -> Launch:
        weights = self.references.weights(self.case.workload)
        self.on_phase("starting ranks", 0, self.case.world_size)
        return self.engine.launch(
            Start(
                case=self.case,
                directory=self.logs / name,
                weights=weights,
                device=self.device,
                instrumented=instrumented,
                nodes=self.nodes,
            )
        )

    def _command(self, name: str, **arguments: Any) -> list[Any]:
        assert self.launch is not None
        return self.launch.command(name, self.on_phase, **arguments)


def is_available(case: Case, engine: Engine) -> bool:
    """Whether its implementation, and what starts its ranks, are usable here; what it takes is not asked."""
    try:
        kind = implementation.load(case.implementation)
        if kind.unavailable() or engine.unavailable(case):
            return False
        kind.prepare(case.options)
    except Exception:  # whatever a library raises while it is imported or compiles
        return False
    return True


def _slowest(answers: list[dict[str, Any]], name: str) -> list[float]:
    """The slowest rank's seconds of each step."""
    return [max(steps) for steps in zip(*(answer[name] for answer in answers), strict=True)]


def _is_of_a_library(error: BaseException) -> bool:
    """Whether a third-party library is missing or broken. Where our own code or the user's is, nothing is harmless."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ImportError) and error.name is not None:
        return error.name.partition(".")[0] not in ("harness", "impls")
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(place in frames[-1].filename for place in ("site-packages", "dist-packages"))
