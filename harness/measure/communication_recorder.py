"""CommunicationRecorder: where every operation of a rank is written down, or passed on, nulled or delayed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from harness.measure.communication import Event, StepRecord
from harness.measure.delay_line import DelayLine

Mode = Literal["pass", "record", "null", "delay"]
Mark = float | torch.cuda.Event  # a point in time: on the host's clock, or on a CUDA stream and read later

SETTLE_SECONDS = 2.0
"""How long the end of a step waits for completions that are on their way."""
IGNORED = -1
"""The ticket of an operation that nobody records."""


@dataclass(kw_only=True)
class _Entry:
    operation: str
    ranks: tuple[int, ...]
    dtype: str
    payload_bytes: int
    wire_bytes: int
    transport: str
    device: torch.device
    launched: Mark
    returned: Mark
    completed: Mark | None = None
    completes_unasked: bool = True
    blocked: list[tuple[Mark, Mark]] = field(default_factory=list)


class CommunicationRecorder:
    """The process groups of `recording_backend` and transports of one's own report here (`CollectiveObserver`).

    Mode `pass` lets operations through and records nothing; `record` keeps those launched between `begin_step` and
    `end_step`; `null` is the null twin, where everything completes at once and moves nothing, so that results are
    garbage and only the time of a step means anything; `delay` is a longer link, where everything is launched
    `delay_seconds` late, without holding up its caller. Set it between steps, on every rank, after the set-up and the
    first two real steps, in which libraries agree on buckets and sizes. Safe to call from any thread: completions
    arrive on the backend's.
    """

    def __init__(self) -> None:
        self._mode: Mode = "pass"
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._next_ticket = 0
        self._start: float | None = None
        self._cuda_start: torch.cuda.Event | None = None
        self.delay_seconds = 0.0
        self._delay_line = DelayLine()
        self._due: dict[int, float] = {}  # by ticket: when a delayed operation may go on
        self._has_undelayed = False

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"communication recorder: mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        if self._mode == "delay":
            self._delay_line.drain()  # what is left over must not be overtaken
        with self._changed:
            self._due.clear()
        self._mode = mode

    @property
    def null(self) -> bool:
        return self._mode == "null"

    @property
    def delaying(self) -> bool:
        return self._mode == "delay"

    @property
    def delayed_all(self) -> bool:
        """Whether every operation was delayed that was to be: if not, delayed steps mean nothing."""
        return not self._has_undelayed

    def launch_later(self, launch: Callable[[], None]) -> None:
        """Calls `launch` after the delay, on another thread."""
        self._delay_line.put(launch, self.delay_seconds)

    def could_not_delay(self) -> None:
        """An operation of a delayed step went on without its delay."""
        self._has_undelayed = True

    @property
    def recording(self) -> bool:
        return self._mode == "record" and self._start is not None

    def begin_step(self) -> None:
        """Starts a step; ends of operations launched before it are forgotten."""
        if self._start is not None:
            raise ValueError("communication recorder: begin_step needs the previous step to have ended")
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self._cuda_start = torch.cuda.Event(enable_timing=True)
            self._cuda_start.record()
        self._start = time.perf_counter()

    def end_step(self) -> StepRecord:
        """Ends the step, waits for its outstanding completions and returns what was recorded. An operation that nobody
        waited for, and whose completion cannot be seen otherwise, counts as in flight until the end of the step."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        end = time.perf_counter()
        if self._start is None:
            raise ValueError("communication recorder: end_step needs a begin_step before it")
        with self._changed:
            self._changed.wait_for(self._settled, timeout=SETTLE_SECONDS)
            entries, self._entries = list(self._entries.values()), {}
            start, self._start = self._start, None
        return StepRecord(start=start, end=end, events=tuple(self._event(entry, start, end) for entry in entries))

    def launched(self, operation: str, ranks: tuple[int, ...], tensor: Tensor, wire_bytes: int, transport: str) -> int:
        """A collective on `tensor`, a payload in the sense of [Note: Sizes], starts now; returns a ticket."""
        if self.delaying:
            with self._changed:
                ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
                self._due[ticket] = time.perf_counter() + self.delay_seconds
            return ticket
        payload_bytes = tensor.numel() * tensor.element_size()
        return self.opened(
            operation, ranks, [tensor], payload_bytes=payload_bytes, wire_bytes=wire_bytes, transport=transport
        )

    def opened(
        self,
        operation: str,
        ranks: tuple[int, ...],
        tensors: Sequence[Tensor],
        *,
        payload_bytes: int,
        wire_bytes: int,
        transport: str,
    ) -> int:
        """An operation that involves `tensors`, none for a barrier, is about to be called; returns a ticket."""
        if not self.recording:
            return IGNORED
        device = tensors[0].device if tensors else torch.device("cpu")
        launched = now(device)
        entry = _Entry(
            operation=operation,
            ranks=ranks,
            dtype="+".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})),
            payload_bytes=payload_bytes,
            wire_bytes=wire_bytes,
            transport=transport,
            device=device,
            launched=launched,
            returned=launched,
        )
        with self._changed:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._entries[ticket] = entry
        return ticket

    def arrived(self, ticket: int) -> bool:
        """Whether what peers have put in may be looked at: not before a delayed operation's delay has passed."""
        return time.perf_counter() >= self._due.get(ticket, 0.0)

    def returned(self, ticket: int) -> None:
        """The call has returned; it blocked its caller until now."""
        if entry := self._entries.get(ticket):
            entry.returned = now(entry.device)
            entry.blocked.append((entry.launched, entry.returned))

    def completes_in_wait(self, ticket: int) -> None:
        """Its completion is seen only by who waits for it, so the end of a step does not."""
        if entry := self._entries.get(ticket):
            entry.completes_unasked = False

    def completed(self, ticket: int) -> None:
        """It has completed; the first report counts."""
        if not self.arrived(ticket):
            self.could_not_delay()
        with self._changed:
            self._due.pop(ticket, None)
            entry = self._entries.get(ticket)
            if entry is not None and entry.completed is None:
                entry.completed = now(entry.device)
                self._changed.notify_all()

    @contextmanager
    def blocked(self, ticket: int) -> Iterator[None]:
        """While inside, the caller does nothing but wait for, or itself carry out, this collective."""
        entry = self._entries.get(ticket)
        if entry is None:
            yield
            return
        begin = now(entry.device)
        try:
            yield
        finally:
            entry.blocked.append((begin, now(entry.device)))

    def _settled(self) -> bool:
        return all(entry.completed is not None or not entry.completes_unasked for entry in self._entries.values())

    def _event(self, entry: _Entry, start: float, end: float) -> Event:
        def seconds(mark: Mark) -> float:
            if isinstance(mark, float):
                return mark
            assert self._cuda_start is not None, "a CUDA mark within a step that began before CUDA did"
            return start + float(self._cuda_start.elapsed_time(mark)) / 1e3

        return Event(
            operation=entry.operation,
            ranks=entry.ranks,
            dtype=entry.dtype,
            payload_bytes=entry.payload_bytes,
            wire_bytes=entry.wire_bytes,
            transport=entry.transport,
            launched=seconds(entry.launched),
            returned=seconds(entry.returned),
            completed=end if entry.completed is None else seconds(entry.completed),
            blocked=tuple((seconds(begin), seconds(finish)) for begin, finish in entry.blocked),
        )


def now(device: torch.device) -> Mark:
    """Now, for whoever computes on `device`: the host, or the current CUDA stream (which waits, where the host does
    not; inside a completion callback it is the stream that has waited for the collective)."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
