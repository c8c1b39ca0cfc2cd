"""References: the single-process runs that cases are held against, made once for each kind of work in a suite run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from harness import models
from harness.case import Case
from harness.launch.failure import LaunchFailed
from harness.launch.local import LocalLaunch
from harness.launch.watched import OnProgress
from harness.layout import Layout
from harness.parity import Tolerance
from harness.rank_records import assemble
from harness.trajectory import Trajectory

_ENVELOPE_SEEDS = (101, 102, 103)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What tells one single-process run from another."""

    workload: str
    precision: str
    data_degree: int
    num_steps: int
    threads: int
    rounded_otherwise: bool = False  # starting weights that are one unit in the last place away


class References:
    """Starting weights, trajectories and tolerances, kept while a suite runs. `directory` holds weights and tensors;
    `logs` the output of the one process that makes them all. LaunchFailed if a reference itself fails; nobody is the
    culprit then. One that has timed out is not waited for again."""

    def __init__(self, directory: Path, logs: Path, *, deadline_seconds: float = 300.0) -> None:
        self._directory = directory
        self._logs = logs
        self._deadline_seconds = deadline_seconds
        self._process: LocalLaunch | None = None
        self._num_processes = 0
        self._weights: dict[tuple[str, bool], Path] = {}
        self._trajectories: dict[_Run, Trajectory] = {}
        self._tolerances: dict[_Run, Tolerance] = {}
        self._timed_out: dict[_Run, LaunchFailed] = {}

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def weights(self, workload: str) -> Path:
        """The file of the workload's starting weights, written by one process on the CPU."""
        key = (_weights_key(workload), False)
        if key not in self._weights:
            path = self._directory / f"weights-{len(self._weights)}.pt"
            run = _Run(workload=workload, precision="fp32", data_degree=1, num_steps=0, threads=1)
            self._carry_out(run, None, lambda process: process.command("save_weights", path=str(path)))
            self._weights[key] = path
        return self._weights[key]

    def _weights_rounded_otherwise(self, workload: str) -> Path:
        key = (_weights_key(workload), True)
        if key not in self._weights:
            path = self._directory / f"weights-{len(self._weights)}.pt"
            state = torch.load(self.weights(workload), weights_only=True)
            with torch.device("meta"):
                parameters = dict(models.load(workload).model().named_parameters(remove_duplicate=False))
            round_otherwise([state[name] for name in parameters if name in state])
            torch.save(state, path)
            self._weights[key] = path
        return self._weights[key]

    def trajectory(self, case: Case, on_progress: OnProgress | None = None) -> Trajectory:
        """The reference's own run of the case's work; in fp32 for a case in bf16, see Tolerance.from_seeds."""
        run = self._run_for(case)
        return self._trajectory(replace(run, precision=lane_of(run.precision)), on_progress)

    def tolerance(self, case: Case, on_progress: OnProgress | None = None) -> Tolerance:
        """How far the case may be from it: 1e-12 in fp64; in fp32 a multiple of the distance between the reference and
        itself with another micro-batch split and another thread count, and from weights one unit in the last place
        away; in bf16 an envelope from several seeds."""
        run = self._run_for(case)
        if run not in self._tolerances:
            self._tolerances[run] = self._make_tolerance(run, on_progress)
        return self._tolerances[run]

    def _make_tolerance(self, run: _Run, on_progress: OnProgress | None) -> Tolerance:
        if run.precision == "fp64":
            return Tolerance.exact()
        if run.precision == lane_of(run.precision):
            # Another split of the batch adds up in another order over samples alone. Who cuts a layer adds up in
            # another order over features, too: every output is rounded otherwise, as it is when weights are.
            others = (
                replace(run, workload=_split_otherwise(run.workload), threads=2),
                replace(run, rounded_otherwise=True),
            )
            return Tolerance.from_noise(
                self._trajectory(run, on_progress), *(self._train(other, on_progress) for other in others)
            )
        pairs = []
        for seed in _ENVELOPE_SEEDS:
            low = replace(run, workload=models.with_options(run.workload, seed=seed))
            pairs.append((self._train(low, on_progress), self._train(replace(low, precision="fp32"), on_progress)))
        return Tolerance.from_seeds(pairs)

    def _run_for(self, case: Case) -> _Run:
        workload = models.load(case.workload)
        return _Run(
            workload=case.workload,
            precision=case.precision,
            data_degree=case.layout.data if workload.depends_on_chunks else 1,
            num_steps=case.measurement.parity_steps,
            threads=1,
        )

    def _trajectory(self, run: _Run, on_progress: OnProgress | None) -> Trajectory:
        if run not in self._trajectories:
            self._trajectories[run] = self._train(run, on_progress)
        return self._trajectories[run]

    def _train(self, run: _Run, on_progress: OnProgress | None) -> Trajectory:
        tensors = self._directory / "reference.pt"

        def train(process: LocalLaunch) -> list[Any]:
            process.command("build", on_progress)
            return process.command("parity", on_progress, num_steps=run.num_steps, path=str(tensors))

        weights = self._weights_rounded_otherwise if run.rounded_otherwise else self.weights
        records = self._carry_out(run, weights(run.workload), train)
        trajectory = assemble(records, tensors, Layout())
        tensors.unlink()
        return trajectory

    def _carry_out(self, run: _Run, weights: Path | None, work: Callable[[LocalLaunch], T]) -> T:
        """Has the reference's process take on the case of `run` and do `work`; one that fails is not used again."""
        if run in self._timed_out:
            raise self._timed_out[run]
        case = Case(
            workload=run.workload,
            implementation="reference",
            options={"data_degree": run.data_degree},
            precision=run.precision,
            role="reference",
        )
        process = self._living_process(case)
        try:
            process.extend_deadline()
            process.command(
                "adopt", case=case.to_json(), weights=None if weights is None else str(weights), threads=run.threads
            )
            return work(process)
        except LaunchFailed as failure:
            told = LaunchFailed(failure.status, f"the reference: {failure.reason}", traceback=failure.traceback)
            if failure.status == "timed out":
                self._timed_out[run] = told
            raise told from failure

    def _living_process(self, case: Case) -> LocalLaunch:
        """The process, started anew where it has died; `case` is only what it starts with."""
        if self._process is not None and not self._process.is_alive:
            self._process.kill()
            self._process = None
        if self._process is None:
            logs = self._logs / f"reference-{self._num_processes}"
            self._process = LocalLaunch(case.to_json(), 1, logs, deadline_seconds=self._deadline_seconds)
            self._num_processes += 1
        return self._process


def round_otherwise(weights: Iterable[torch.Tensor]) -> None:
    """Moves every element of fp32 weights by one unit in the last place, up or down by chance; zeros stay zeros, and
    the largest number there is, of which masks are made, stays finite. Weights that are one tensor under two names move
    once."""
    generator = torch.Generator().manual_seed(0)
    moved = set()
    for weight in weights:
        if weight.dtype == torch.float32 and weight.data_ptr() not in moved:
            moved.add(weight.data_ptr())
            up = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.bool)
            infinity = torch.full_like(weight, torch.inf)
            other = torch.nextafter(weight, torch.where(up, infinity, -infinity))
            weight.copy_(torch.where((weight != 0) & weight.isfinite() & other.isfinite(), other, weight))


def lane_of(precision: str) -> str:
    """The precision of the truth that a case in `precision` is held against."""
    return "fp64" if precision == "fp64" else "fp32"


def _weights_key(workload: str) -> str:
    """Workloads that differ only in how they are trained start from the same weights."""
    return models.without_training_options(workload, keep=("seed",))


def _split_otherwise(workload: str) -> str:
    """The same work in twice as many micro-batches, or in one where it cannot be cut further. Where the cut changes the
    result itself, only the thread count is left to differ."""
    loaded = models.load(workload)
    with torch.device("meta"):
        has_buffers = any(True for _ in loaded.model().buffers())
    if loaded.depends_on_chunks or loaded.synchronise_batch_norm or has_buffers:
        return workload
    size, num_micro_batches = loaded.training.global_batch_size, loaded.training.num_micro_batches
    others = [count for count in (2 * num_micro_batches, size, 1) if count <= size and count != num_micro_batches]
    return models.with_options(workload, num_micro_batches=others[0]) if others else workload
