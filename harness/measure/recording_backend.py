"""A torch.distributed backend that wraps the real one and reports every operation to a CommunicationRecorder.

It lies below all libraries: Python code calls its methods, and so does C++ (DDP's reducer, functional collectives)
through torch's trampoline for Python process groups. The real groups underneath are built as torch builds them. Groups
that a library asks of another backend by name (`new_group(backend="gloo")`) are not seen.

What torch ties to its own names is out of reach: `get_backend()` says `recording`, so `dist.monitored_barrier` refuses,
and `batch_isend_irecv` issues its operations one by one, as it does on gloo.
"""

# torch's stubs spell out several overloads a method, under changing argument names; here one form takes them all.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from harness.measure.communication_recorder import CommunicationRecorder
from harness.measure.observed_work import DelayedWork, NullWork, RecordedWork, SettledWork
from harness.wire_bytes import Algorithm, wire_bytes

BACKEND_NAME = "recording"
RealBackend = Literal["gloo", "nccl"]


def install(recorder: CommunicationRecorder, real_backend: RealBackend = "gloo") -> None:
    """Registers BACKEND_NAME with torch: groups made of it from now on wrap `real_backend` and report to `recorder`."""
    if real_backend not in ("gloo", "nccl"):
        raise ValueError(f"recording backend: expected gloo or nccl underneath, got {real_backend!r}")

    def create(options: Any, _: Any) -> RecordingProcessGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))  # empty: the default group
        return RecordingProcessGroup(recorder, real_backend, ranks, options)

    devices = list(dist.Backend.backend_capability[real_backend])
    dist.Backend.register_backend(BACKEND_NAME, create, extended_api=True, devices=devices)


class RecordingProcessGroup(ProcessGroup):
    """Looks like a group of the real backend; `ranks` are its global ranks. Sizes as in communication.py's Note."""

    def __init__(
        self, recorder: CommunicationRecorder, real_backend: RealBackend, ranks: tuple[int, ...], options: Any
    ) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]  # the stubs lack this form
        self._recorder = recorder
        self._transport = real_backend
        self._algorithm: Algorithm = "gloo" if real_backend == "gloo" else "ring"
        self._ranks = ranks
        self._real = ProcessGroup(options.store, options.group_rank, options.group_size)
        backend = _real_backend(real_backend, ranks, options)
        backend_type = dist.Backend.backend_type_map[real_backend]
        # This group holds the backend as well: C++ then finds its name, devices and time-out where it expects them.
        for group in (self._real, self):
            ProcessGroup._set_default_backend(group, backend_type)
            for device in dist.Backend.backend_capability[real_backend]:
                ProcessGroup._register_backend(group, torch.device(device), backend_type, backend)

    def get_group_store(self) -> Store:
        return self._real.get_group_store()

    # One tensor, the same on every rank.

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.allreduce, tensors, *args, **kwargs)
        return self._observe("all_reduce", call, tensors, _num_bytes(tensors))

    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.allreduce_coalesced, tensors, *args, **kwargs)
        return self._observe("all_reduce_coalesced", call, tensors, _num_bytes(tensors))

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.broadcast, tensors, *args, **kwargs)
        return self._observe("broadcast", call, tensors, _num_bytes(tensors), root=_root(args, kwargs))

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.reduce, tensors, *args, **kwargs)
        return self._observe("reduce", call, tensors, _num_bytes(tensors), root=_root(args, kwargs))

    # From a part to the whole.

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.allgather, outputs, inputs, *args, **kwargs)
        return self._observe("all_gather", call, outputs, _num_bytes(outputs))

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.allgather_coalesced, outputs, inputs, *args, **kwargs)
        return self._observe("all_gather_coalesced", call, outputs, _num_bytes(outputs))

    def all_gather_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.all_gather_single, output, input, *args, **kwargs)
        return self._observe("all_gather_into_tensor", call, output, _num_bytes(output))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.all_gather_single_coalesced, outputs, inputs, *args, **kwargs)
        return self._observe("all_gather_into_tensor_coalesced", call, outputs, _num_bytes(outputs))

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.gather, outputs, inputs, *args, **kwargs)
        payload = _num_bytes(inputs) * self.size()
        return self._observe("gather", call, inputs, payload, root=_root(args, kwargs))

    # From the whole to a part.

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.reduce_scatter, outputs, inputs, *args, **kwargs)
        return self._observe("reduce_scatter", call, outputs, _num_bytes(inputs))

    def reduce_scatter_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.reduce_scatter_single, output, input, *args, **kwargs)
        return self._observe("reduce_scatter_tensor", call, output, _num_bytes(input))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.reduce_scatter_single_coalesced, outputs, inputs, *args, **kwargs)
        return self._observe("reduce_scatter_tensor_coalesced", call, outputs, _num_bytes(inputs))

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.scatter, outputs, inputs, *args, **kwargs)
        payload = _num_bytes(outputs) * self.size()
        return self._observe("scatter", call, outputs, payload, root=_root(args, kwargs))

    # From each to each.

    def alltoall(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._real.alltoall, outputs, inputs, *args, **kwargs)
        sent = _num_bytes(inputs) - _num_bytes(inputs[self.rank()])
        return self._observe("all_to_all", call, outputs, _num_bytes(inputs), wire=sent)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, *args: Any, **kwargs: Any
    ) -> Any:
        call = partial(self._real.all_to_all_single, output, input, output_splits, input_splits, *args, **kwargs)
        payload = _num_bytes(input)
        kept = payload // self.size()
        if input_splits:
            kept = payload * input_splits[self.rank()] // max(1, sum(input_splits))
        return self._observe("all_to_all_single", call, output, payload, wire=payload - kept)

    # From one to one.

    def send(self, tensors: Any, destination: int, tag: int) -> Any:
        ranks = (self._ranks[self.rank()], self._ranks[destination])
        call = partial(self._real.send, tensors, destination, tag)
        return self._observe("send", call, tensors, _num_bytes(tensors), ranks=ranks)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        ranks = (self._ranks[source], self._ranks[self.rank()])
        call = partial(self._real.recv, tensors, source, tag)
        return self._observe("recv", call, tensors, _num_bytes(tensors), ranks=ranks)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self._observe("recv", partial(self._real.recv_anysource, tensors, tag), tensors, _num_bytes(tensors))

    # Without data.

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self._observe("barrier", partial(self._real.barrier, *args, **kwargs), (), 0)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        real: Any = self._real  # the stubs lack it
        work = self._observe("barrier", partial(real.monitored_barrier, timeout, wait_all_ranks), (), 0)
        if work is not None:
            work.wait()

    # The names these had before torch 2.13; libraries still use them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _observe(
        self,
        operation: str,
        call: Callable[[], Any],
        results: Any,
        payload: int,
        *,
        root: int = 0,
        ranks: tuple[int, ...] | None = None,
        wire: int | None = None,
    ) -> Any:
        """Calls, now or later, or in the null twin not at all; `results` are the tensors that the operation fills or
        sends."""
        if self._recorder.null:
            return NullWork(list(_flatten(results)))
        if self._recorder.delaying:
            return self._delay(call)
        if not self._recorder.recording:
            work = call()
            return SettledWork(work) if work is not None and torch._C._autograd._profiler_enabled() else work
        if wire is None:
            wire = wire_bytes(operation, payload, self.size(), self._algorithm, group_rank=self.rank(), root=root)
        ticket = self._recorder.opened(
            operation,
            ranks or self._ranks,
            list(_flatten(results)),
            payload_bytes=payload,
            wire_bytes=wire,
            transport=self._transport,
        )
        try:
            work = call()
        except BaseException:
            self._recorder.completed(ticket)
            raise
        self._recorder.returned(ticket)
        if work is None:  # a monitored barrier: done when it returns
            self._recorder.completed(ticket)
            return None
        return RecordedWork(work, self._recorder, ticket)

    def _delay(self, call: Callable[[], Any]) -> Any:
        """Calls later, or at once where a launch must come from the caller's own thread, and says so."""
        if self._transport != "gloo":
            self._recorder.could_not_delay()
            return call()
        work = DelayedWork(call)
        self._recorder.launch_later(work.launch)
        return work


def _real_backend(name: RealBackend, ranks: tuple[int, ...], options: Any) -> Any:
    place = (options.store, options.group_rank, options.group_size)
    backend: Any
    if name == "gloo":
        backend = dist.ProcessGroupGloo(*place, timeout=options.timeout)
        backend.options.global_ranks_in_group = list(ranks)
        backend.options.group_name = options.group_id
    else:
        settings = dist.ProcessGroupNCCL.Options()
        settings._timeout = options.timeout
        settings.global_ranks_in_group = list(ranks)
        settings.group_name = options.group_id
        backend = dist.ProcessGroupNCCL(*place, settings)
    backend._set_sequence_number_for_group()
    return backend


def _flatten(tensors: Tensor | Sequence[Any]) -> Iterable[Tensor]:
    """A tensor, a list of them, or a list of lists."""
    if isinstance(tensors, Tensor):
        yield tensors
    else:
        for inner in tensors:
            yield from _flatten(inner)


def _num_bytes(tensors: Tensor | Sequence[Any]) -> int:
    """Of the elements that the tensors show, whatever the size of the storage behind them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _flatten(tensors))


def _root(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The root's rank in the group: torch passes it in an options object, or as itself; absent, it is 0."""
    given = args[0] if args else kwargs.get("opts", kwargs.get("root", 0))
    return given if isinstance(given, int) else int(given.rootRank)
