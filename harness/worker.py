"""One rank: builds its implementation and carries out the commands it is sent; nothing but its answers leaves it."""

from __future__ import annotations

import errno
import faulthandler
import gc
import hashlib
import io
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from harness import environment, implementation, models
from harness.case import Case
from harness.launch.failure import Report
from harness.launch.fork_server import tie_to_server
from harness.launch.roll_call import missing_ranks
from harness.launch.timeouts import JOIN_SECONDS
from harness.launch.watched import Job
from harness.link_table import Operation
from harness.measure.collectives import collective_seconds
from harness.measure.communication import StepRecord
from harness.measure.communication_recorder import CommunicationRecorder
from harness.measure.fixed_work import fixed_work_seconds
from harness.measure.memory import NUM_WARM_UP_STEPS, MemoryRecorder, MemoryReport
from harness.measure.pipeline import PipelineRecorder, Step
from harness.measure.recording_backend import BACKEND_NAME, install
from harness.measure.resident import give_back_freed_memory
from harness.mesh import Mesh
from harness.required_gradients import require_in_first_step
from harness.workload import Batch, Workload, in_precision

_OUT_OF_MEMORY = r"can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED"
_MAX_WARM_UP_FACTOR = 3
_STATIONARY_WITHIN = 0.1
_GRADIENT_STEPS = 2
_CANARY_SIZES = {"cpu": (512, 2**20), "cuda": (8192, 2**26)}  # a matrix' width, a message's elements: milliseconds each


def main(channel: connection.Connection, job: Job, tie: Callable[[], None] = tie_to_server) -> None:
    """Runs in the rank's process until it is told to exit; `tie` makes the process end with what has started it."""
    worker: Worker | None = None
    try:
        _settle(job, tie)
        worker = Worker(job, lambda *progress: channel.send(("progress", progress)))
        while (request := _next_request(channel)) is not None:
            name, arguments = request
            channel.send(("answer", getattr(worker, name)(**arguments)))
    except BaseException as error:
        report = _report(error)
        if worker is not None and report.is_echo:
            report = replace(report, missing=missing_ranks(worker.roll_call))
        channel.send(("failed", report))
        traceback.print_exc()
        while True:  # the parent ends all ranks together: an early exit would look like the cause to the others
            signal.pause()
    worker.close()


def _next_request(channel: connection.Connection) -> tuple[str, dict[str, Any]] | None:
    """The next command; None when the rank shall leave, or the parent is gone."""
    try:
        name, arguments = channel.recv()
    except EOFError:
        return None
    return None if name == "exit" else (name, arguments)


def _report(error: BaseException) -> Report:
    return Report(
        at=time.monotonic(),
        error=f"{type(error).__name__}: {error}".splitlines()[0],
        traceback=traceback.format_exc(),
        out_of_memory=_is_out_of_memory(error),
    )


class Worker:
    """The state of one rank. Public methods are the commands; each is called on all ranks together."""

    def __init__(self, job: Job, progress: Callable[[str, int, int], None]) -> None:
        self.job = job
        self.progress = progress
        self.device = torch.device(job.device)
        if job.device == "cuda":
            num_devices = torch.cuda.device_count()
            if job.local_rank >= num_devices:
                raise ValueError(f"rank {job.rank} needs a CUDA device of its own, this machine has {num_devices}")
            self.device = torch.device("cuda", job.local_rank)
            torch.cuda.set_device(self.device)  # events, streams and NCCL go by the current device
        self.recorder = CommunicationRecorder() if job.instrumented else None
        self.implementation: implementation.Implementation | None = None
        self._timeout = timedelta(seconds=job.timeout_seconds)
        self.progress("joining", 0, 1)
        real_backend: Literal["nccl", "gloo"] = "nccl" if job.device == "cuda" else "gloo"
        if self.recorder is not None:
            install(self.recorder, real_backend=real_backend)
        world_size = Case.from_json(job.case).world_size
        store = _store(job, world_size)
        store.set_timeout(timedelta(seconds=min(JOIN_SECONDS, job.timeout_seconds)))
        dist.init_process_group(
            real_backend if self.recorder is None else BACKEND_NAME,
            store=store,
            rank=job.rank,
            world_size=world_size,
            timeout=self._timeout,
        )
        # The harness' own barriers go over a group of their own, so that no instrument sees them.
        self.control = dist.new_group(backend="gloo", timeout=self._timeout)
        self.roll_call = dist.new_group(backend="gloo", timeout=self._timeout)
        store.set_timeout(self._timeout)
        self._take(job.case, job.weights, job.threads)

    def adopt(self, case: dict[str, Any], weights: str | None = None, threads: int = 1) -> None:
        """Gives up the case at hand for another one of the same world size, to be built anew. Figures of time and
        memory want fresh processes; trajectories do not."""
        if self.implementation is not None:
            self.implementation.close()
            self.implementation = None
        self.mesh.close()
        gc.collect()  # hooks make cycles; a group that lives on keeps its threads, which wake up all the time
        self._take(case, None if weights is None else Path(weights), threads)

    def _take(self, case: dict[str, Any], weights: Path | None, threads: int) -> None:
        self._bound_collectives(self._timeout)
        self.case = Case.from_json(case)
        self.step = 0
        self.workload: Workload = in_precision(models.load(self.case.workload), self.case.precision, weights)
        self.mesh = Mesh(
            self.case.layout,
            self.case.placed,
            self.job.rank,
            self.device,
            observer=self.recorder,
            timeout=self._timeout,
        )
        torch.set_num_threads(threads)

    def _bound_collectives(self, timeout: timedelta) -> None:
        """Of all groups that there are, whoever has made them. Messages from one rank to another keep what gloo was
        first told; those are the harness' own deadline's business."""
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timeout, group)

    def _expect_steps_of(self, seconds: float) -> None:
        """From now on ranks wait for each other by the length of a step."""
        self._bound_collectives(timedelta(seconds=self.job.timeouts.of_collective(seconds)))

    def environment(self) -> dict[str, Any]:
        return environment.describe(self.device)

    def save_weights(self, path: str) -> None:
        """Writes the workload's starting weights, in fp32, as every implementation will read them."""
        torch.save(models.load(self.case.workload).build_model().state_dict(), path)

    def build(self) -> dict[str, str]:
        """Builds the implementation; answers which options it really took."""
        self.progress("building", 0, 1)
        kind = implementation.load(self.case.implementation)
        self.implementation = kind(self.workload, self.case.layout, self.mesh, self.device, **self.case.options)
        require_in_first_step(self.implementation, self.case.implementation)
        return {str(name): str(value) for name, value in self.implementation.facts().items()}

    def parity(self, num_steps: int, path: str) -> dict[str, Any]:
        """The first `num_steps` steps, and an evaluation before the last one, which must leave no trace there. Losses
        are this rank's sums; rank 0 writes the full tensors. Only the steps whose gradients are kept track the norm
        too: the later ones run exactly as timed steps do."""
        built = self._built()
        keys = ("loss_sums", "global_num_tokens", "norms", "skipped", "rates", "checksums")
        record: dict[str, Any] = {key: [] for key in keys} | {"evaluation": None}
        gradients: dict[int, dict[str, Tensor]] = {}
        starting_parameters = built.full_parameters()
        for index in range(num_steps):
            self.progress("parity", index, num_steps)
            batch = self._batch()
            if index == num_steps - 1 and (evaluation := built.evaluate(batch)) is not None:
                record["evaluation"] = {
                    "loss_sum": None if evaluation.loss_sum is None else float(evaluation.loss_sum),
                    "num_tokens": evaluation.num_tokens,
                }
            built.tracks_gradient_norm = index < _GRADIENT_STEPS
            began = time.monotonic()
            output = built.train_step(batch)
            self._expect_steps_of(time.monotonic() - began)
            record["loss_sums"].append(None if output.loss_sum is None else float(output.loss_sum))
            record["global_num_tokens"].append(batch.global_num_tokens)
            record["norms"].append(None if output.gradient_norm is None else float(output.gradient_norm))
            record["skipped"].append(bool(output.skipped))
            record["rates"].append(tuple(output.learning_rates))
            record["checksums"].append(checksum(built.replicated_tensors()))
            if index < _GRADIENT_STEPS:
                gradients[index] = built.full_gradients()
        parameters, buffers = built.full_parameters(), built.full_buffers()
        built.tracks_gradient_norm = False
        if self.job.rank == 0:
            full = {"starting_parameters": starting_parameters, "parameters": parameters, "buffers": buffers}
            torch.save({**full, "gradients": gradients}, path)
        return record

    def all_reduce_seconds(self, num_bytes: int, num_repeats: int) -> list[float]:
        """Seconds of each of some all-reduces of `num_bytes` over all ranks, on the harness' own group; one more, which
        does not count, goes before them."""
        payload = torch.ones(max(1, num_bytes // 4))
        seconds = []
        for _ in range(num_repeats + 1):
            dist.barrier(group=self.control)
            began = time.perf_counter()
            dist.all_reduce(payload, group=self.control)
            seconds.append(time.perf_counter() - began)
        return seconds[1:]

    def collective_seconds(self, operation: Operation, payload_bytes: int, num_repeats: int) -> list[float]:
        """Seconds of each of some collectives over all ranks, see harness/measure/collectives.py."""
        return collective_seconds(operation, payload_bytes, num_repeats, control=self.control, device=self.device)

    def round_trip_seconds(self, ranks: tuple[int, int], num_repeats: int) -> list[float]:
        """Seconds of each of some messages of a few bytes from the first of two ranks to the second and back; none on
        the others."""
        message, seconds = torch.zeros(1), []
        here, there = ranks
        for _ in range(num_repeats):
            began = time.perf_counter()
            if self.job.rank == here:
                dist.send(message, there, group=self.control)
                dist.recv(message, there, group=self.control)
                seconds.append(time.perf_counter() - began)
            elif self.job.rank == there:
                dist.recv(message, here, group=self.control)
                dist.send(message, here, group=self.control)
        return seconds

    def replica_checksum(self) -> str:
        """A digest of everything this rank must hold in common with the others of its data axis."""
        return checksum(self._built().replicated_tensors())

    def warm_up(self, num_steps: int) -> int:
        """At least `num_steps` steps, and more while the slowest rank's time still moves; how many it took. Before them
        goes what parity has left behind: cases that take turns are all in memory at a time."""
        give_back_freed_memory()
        recent: list[float] = []
        done, most = 0, num_steps * _MAX_WARM_UP_FACTOR
        while done < num_steps or (done < most and not _is_stationary(recent)):
            self.progress("warming up", done, num_steps if done < num_steps else 0)
            slowest = torch.tensor(self._timed_steps(1).seconds[0])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.control)
            recent = [*recent[-2:], float(slowest)]
            self._expect_steps_of(float(slowest))
            done += 1
        return done

    def time_steps(self, num_steps: int, number: int = 0, num_rounds: int = 1) -> dict[str, Any]:
        """Seconds of each of `num_steps` steps in a row, on this rank, and the processor seconds of them all; and, once
        they are over, the seconds of fixed work in which no rank waits for another, see harness.measure.straggler. This
        is window `number`, from 0, of `num_rounds`."""
        self.progress("timing", number, num_rounds)
        num_tokens = [self.workload.global_num_tokens(self.step + index) for index in range(num_steps)]
        window = self._timed_steps(num_steps)
        return {
            "step_seconds": window.seconds,
            "cpu_seconds": window.cpu_seconds,
            "global_num_tokens": num_tokens,
            "fixed_work_seconds": fixed_work_seconds(self.device),
        }

    def build_and_measure_memory(self, num_steps: int) -> MemoryReport | None:
        """Builds the implementation and trains `num_steps` steps after the warm-up, under the memory instrument."""
        if not num_steps:
            self.build()
            return None
        batches = [self._batch() for _ in range(NUM_WARM_UP_STEPS + num_steps)]
        with MemoryRecorder(self.device) as recorder:
            self.build()
            for index, batch in enumerate(batches):
                self.progress("measuring memory", index, len(batches))
                with recorder.step(self._built().memory_tensors):
                    self._built().train_step(batch)
        return recorder.report()

    def measure_communication(self, num_steps: int) -> dict[str, Any]:
        """Records the collectives of `num_steps` steps; then real and null steps in turn, for what is exposed."""
        recorder, built = self.recorder, self._built()
        assert recorder is not None, "communication is measured in instrumented launches only"
        records: list[StepRecord] = []
        for index in range(num_steps):
            self.progress("measuring communication", index, 2 * num_steps)
            batch = self._batch()
            self._barrier()
            recorder.mode = "record"
            recorder.begin_step()
            built.train_step(batch)
            records.append(recorder.end_step())
            recorder.mode = "pass"
        seconds: dict[str, list[float]] = {"real": [], "null": []}
        for index in range(num_steps):
            self.progress("measuring communication", num_steps + index, 2 * num_steps)
            for kind in ("real", "null"):
                self._barrier()
                recorder.mode = "null" if kind == "null" else "pass"
                seconds[kind] += self._timed_steps(1, synchronised=False).seconds
                recorder.mode = "pass"
        return {"records": records, "real_seconds": seconds["real"], "null_seconds": seconds["null"]}

    def measure_latency(self, num_steps: int, delay_seconds: float) -> dict[str, list[float]] | None:
        """Real and delayed steps in turn, at least `num_steps` of each; None where something went on without its delay.
        Of three steps in a row the first does not count: the others may wait for what it has left in flight."""
        recorder = self.recorder
        assert recorder is not None, "latency is measured in instrumented launches only"
        recorder.delay_seconds = delay_seconds
        seconds: dict[str, list[float]] = {"real": [], "delayed": []}
        while (done := len(seconds["delayed"])) < num_steps:
            self.progress("measuring latency", done, num_steps)
            for kind in ("real", "delayed"):
                self._barrier()
                recorder.mode = "delay" if kind == "delayed" else "pass"
                seconds[kind] += self._timed_steps(3, synchronised=False).seconds[1:]
                recorder.mode = "pass"
        return {f"{kind}_seconds": steps for kind, steps in seconds.items()} if recorder.delayed_all else None

    def measure_pipeline(self, num_steps: int) -> list[Step]:
        """Records the actions of `num_steps` steps, after one that does not count."""
        recorder, built = PipelineRecorder(self.device), self._built()
        self._timed_steps(1)
        for index in range(num_steps):
            self.progress("measuring the pipeline", index, num_steps)
            batch = self._batch()
            self._barrier()
            with recorder.step():
                built.train_step(batch)
        return recorder.steps

    def measure_canary(self, num_rounds: int) -> list[tuple[float, float]]:
        """Seconds of a fixed matrix multiplication and of a fixed all-reduce, for each round; see harness.canary."""
        width, num_elements = _CANARY_SIZES[self.device.type]
        factor = torch.full((width, width), 1 / width, device=self.device)
        product = torch.empty_like(factor)
        message = torch.zeros(num_elements, device=self.device)
        rounds = []
        for _ in range(num_rounds):
            clock = _Clock(self.device)
            self._barrier()
            clock.lap()
            torch.mm(factor, factor, out=product)
            clock.lap()
            dist.all_reduce(message)
            clock.lap()
            multiply, reduce = clock.seconds()
            rounds.append((multiply, reduce))
        return rounds

    def close(self) -> None:
        if self.implementation is not None:
            self.implementation.close()
        dist.destroy_process_group()

    def _built(self) -> implementation.Implementation:
        assert self.implementation is not None, "build comes first"
        return self.implementation

    def _batch(self) -> Batch:
        coordinates = self.mesh.coordinates
        batch = self.workload.batch(self.step, data_rank=coordinates.data, data_degree=self.case.layout.data)
        self.step += 1
        return batch.to(self.device)

    def _timed_steps(self, num_steps: int, *, synchronised: bool = True) -> _Window:
        """Steps back to back; everything they need is made before, so that they are nothing but training."""
        built = self._built()
        batches = [self._batch() for _ in range(num_steps)]
        clock = _Clock(self.device)
        gc.collect()
        gc.disable()
        try:
            if synchronised:
                self._barrier()
            cpu_before = time.process_time()
            clock.lap()
            for batch in batches:
                built.train_step(batch)
                clock.lap()
            return _Window(clock.seconds(), time.process_time() - cpu_before)
        finally:
            gc.enable()

    def _barrier(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self.control)


class _Window(NamedTuple):
    """Some steps in a row: seconds of each, and the processor seconds of all threads over them all."""

    seconds: list[float]
    cpu_seconds: float


class _Clock:
    """Laps on the host's clock, or on the device's own where it works behind the host's back: it is waited for once,
    at the end."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: list[Any] = []

    def lap(self) -> None:
        if self._on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._on_device:
            return [end - start for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000.0 for start, end in pairs]


def checksum(tensors: Iterable[Tensor]) -> str:
    """A digest of the bits of `tensors`, in order."""
    digest = hashlib.sha1(usedforsecurity=False)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten()
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_stationary(seconds: list[float]) -> bool:
    return len(seconds) >= 3 and max(seconds) <= min(seconds) * (1.0 + _STATIONARY_WITHIN)


def _store(job: Job, world_size: int) -> Any:
    """Where the ranks meet: a file of theirs, or what torchrun's agents keep for its workers."""
    if job.rendezvous is not None:
        return dist.FileStore(str(job.rendezvous), world_size)  # type: ignore[attr-defined,unused-ignore]
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=JOIN_SECONDS)
    agents = TCPStore(address, port, is_master=False, timeout=timeout)
    return PrefixStore("meshmark", agents)


def _settle(job: Job, tie: Callable[[], None]) -> None:
    """Makes this process a rank: its own session and log, ended when the harness ends."""
    # What has been loaded by now, by the fork server for the most part, is never garbage: without it a collection takes
    # a millisecond, not a third of a second, and copies none of the pages that ranks share.
    gc.freeze()
    if os.getsid(0) != os.getpid():
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tie()
    if job.network is not None:
        job.network.enter()  # before anything makes a thread or a socket
    log = _open_anew(job.log)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a rank that is killed flushes nothing
    faulthandler.register(signal.SIGUSR1, file=_open_anew(job.stack), all_threads=False)


def _open_anew(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out, by whichever allocator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and re.search(_OUT_OF_MEMORY, str(error)) is not None
