"""One rank: builds its implementation and carries out the commands it is sent; nothing but its answers leaves it."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from harness import environment, implementation, models
from harness.case import Case
from harness.launch.local import Job
from harness.measure.communication import StepRecord
from harness.measure.communication_recorder import CommunicationRecorder
from harness.measure.memory import NUM_WARM_UP_STEPS, MemoryRecorder, MemoryReport
from harness.measure.recording_backend import BACKEND_NAME, install
from harness.mesh import Mesh
from harness.workload import Batch, Workload, in_precision

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_MAX_WARM_UP_FACTOR = 3
_STATIONARY_WITHIN = 0.1
_GRADIENT_STEPS = 2


def main(channel: connection.Connection, job: Job) -> None:
    """Runs in the rank's process until it is told to exit."""
    _settle(job)
    try:
        worker = Worker(job, lambda *progress: channel.send(("progress", progress)))
        while True:
            name, arguments = channel.recv()
            if name == "exit":
                worker.close()
                return
            channel.send(("answer", getattr(worker, name)(**arguments)))
    except EOFError:
        return  # the parent is gone
    except BaseException as error:
        failure = {
            "at": time.monotonic(),
            "error": f"{type(error).__name__}: {error}".splitlines()[0],
            "traceback": traceback.format_exc(),
            "out_of_memory": _is_out_of_memory(error),
        }
        traceback.print_exc()
        channel.send(("failed", failure))
        signal.pause()  # the parent ends all ranks together: an early exit would look like the cause to the others


class Worker:
    """The state of one rank. Public methods are the commands; each is called on all ranks together."""

    def __init__(self, job: Job, progress: Callable[[str, int, int], None]) -> None:
        self.job = job
        self.progress = progress
        self.device = torch.device(job.device, job.rank) if job.device == "cuda" else torch.device(job.device)
        self.recorder = CommunicationRecorder() if job.instrumented else None
        self.implementation: implementation.Implementation | None = None
        self._timeout = timedelta(seconds=job.timeout_seconds)
        self.progress("joining", 0, 1)
        real_backend: Literal["nccl", "gloo"] = "nccl" if job.device == "cuda" else "gloo"
        if self.recorder is not None:
            install(self.recorder, real_backend=real_backend)
        dist.init_process_group(
            real_backend if self.recorder is None else BACKEND_NAME,
            init_method=f"file://{job.directory.resolve()}/rendezvous",
            rank=job.rank,
            world_size=Case.from_json(job.case).world_size,
            timeout=self._timeout,
        )
        # The harness' own barriers go over a group of their own, so that no instrument sees them.
        self.control = dist.new_group(backend="gloo", timeout=self._timeout)
        self._take(job.case, job.weights, job.threads)

    def adopt(self, case: dict[str, Any], weights: str | None = None, threads: int = 1) -> None:
        """Gives up the case at hand for another one of the same world size, to be built anew. Figures of time and
        memory want fresh processes; trajectories do not."""
        if self.implementation is not None:
            self.implementation.close()
            self.implementation = None
        self.mesh.close()
        self._take(case, None if weights is None else Path(weights), threads)

    def _take(self, case: dict[str, Any], weights: Path | None, threads: int) -> None:
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

    def environment(self) -> dict[str, Any]:
        return environment.describe(self.device)

    def save_weights(self, path: str) -> None:
        """Writes the workload's starting weights, in fp32, as every implementation will read them."""
        torch.save(models.load(self.case.workload).build_model().state_dict(), path)

    def build(self) -> dict[str, Any]:
        """Builds the implementation; answers which options it really took."""
        self.progress("building", 0, 1)
        kind = implementation.load(self.case.implementation)
        self.implementation = kind(self.workload, self.case.layout, self.mesh, self.device, **self.case.options)
        return dict(self.implementation.facts())

    def parity(self, num_steps: int, path: str) -> dict[str, Any]:
        """The first `num_steps` steps, watched. Losses are this rank's sums; rank 0 writes the full tensors."""
        built = self._built()
        built.tracks_gradient_norm = True
        keys = ("loss_sums", "num_tokens", "global_num_tokens", "norms", "skipped", "rates", "checksums")
        record: dict[str, Any] = {key: [] for key in keys}
        gradients: dict[int, dict[str, Tensor]] = {}
        starting_parameters = built.full_parameters()
        for index in range(num_steps):
            self.progress("parity", index, num_steps)
            batch = self._batch()
            output = built.train_step(batch)
            record["loss_sums"].append(None if output.loss_sum is None else float(output.loss_sum))
            record["num_tokens"].append(output.num_tokens)
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

    def warm_up(self, num_steps: int) -> int:
        """At least `num_steps` steps, and more while the slowest rank's time still moves; how many it took."""
        recent: list[float] = []
        done, most = 0, num_steps * _MAX_WARM_UP_FACTOR
        while done < num_steps or (done < most and not _is_stationary(recent)):
            self.progress("warming up", done, num_steps)
            slowest = torch.tensor(self._timed_steps(1)[0])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.control)
            recent = [*recent[-2:], float(slowest)]
            done += 1
        return done

    def time_steps(self, num_steps: int) -> dict[str, Any]:
        """Seconds of each of `num_steps` steps in a row, on this rank, and the processor seconds of them all."""
        self.progress("timing", 0, num_steps)
        num_tokens = [self.workload.global_num_tokens(self.step + index) for index in range(num_steps)]
        cpu_before = time.process_time()
        seconds = self._timed_steps(num_steps)
        cpu_seconds = time.process_time() - cpu_before
        return {"step_seconds": seconds, "cpu_seconds": cpu_seconds, "global_num_tokens": num_tokens}

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
                seconds[kind] += self._timed_steps(1, synchronised=False)
                recorder.mode = "pass"
        return {"records": records, "real_seconds": seconds["real"], "null_seconds": seconds["null"]}

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

    def _timed_steps(self, num_steps: int, *, synchronised: bool = True) -> list[float]:
        """Steps back to back; everything they need is made before, so that they are nothing but training."""
        built = self._built()
        batches = [self._batch() for _ in range(num_steps)]
        clock = _Clock(self.device)
        gc.collect()
        gc.disable()
        try:
            if synchronised:
                self._barrier()
            clock.start()
            for batch in batches:
                built.train_step(batch)
                clock.lap()
            return clock.seconds()
        finally:
            gc.enable()

    def _barrier(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self.control)


class _Clock:
    """Laps on the host's clock, or on the device's own where it works behind the host's back: it is waited for once,
    at the end."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        self.lap()

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


def _settle(job: Job) -> None:
    """Makes this process a rank: its own session, its own log, ended when the launcher's server ends."""
    os.setsid()
    if hasattr(ctypes, "CDLL") and os.name == "posix":
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "prctl"):
            libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    log = os.open(job.directory / f"rank-{job.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = os.open(job.directory / f"rank-{job.rank}.stack", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
