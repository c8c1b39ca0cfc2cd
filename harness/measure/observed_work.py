"""What the recording backend hands out instead of the real work: one that reports, one that has nothing to do, one that
is launched later, and one for the memory instrument."""

# torch's stubs spell out several overloads a method, under changing argument names; here one form takes them all.
# mypy: disable-error-code="override"

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from harness.measure.communication_recorder import CommunicationRecorder

_SETTLING_SECONDS = 2e-3


class _PassedOn(Work):
    """The real work, but for what subclasses add."""

    def __init__(self, real: Work) -> None:
        super().__init__()
        self._real = real

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._real.wait(timeout)

    def get_future(self) -> Any:
        return self._real.get_future()

    def is_completed(self) -> bool:
        return self._real.is_completed()

    def is_success(self) -> bool:
        return self._real.is_success()

    def exception(self) -> Any:
        return self._real.exception()

    def result(self) -> list[Tensor]:
        return self._real.result()

    def synchronize(self) -> None:
        self._real.synchronize()

    def block_current_stream(self) -> None:
        self._real.block_current_stream()

    def source_rank(self) -> int:
        return self._real.source_rank()

    def _source_rank(self) -> int:
        return self._real._source_rank()


class RecordedWork(_PassedOn):
    """It reports when it completes and how long its callers wait."""

    def __init__(self, real: Work, recorder: CommunicationRecorder, ticket: int) -> None:
        super().__init__(real)
        self._recorder = recorder
        self._ticket = ticket
        try:
            future = real.get_future()
        except RuntimeError:  # gloo's point-to-point and reduce-scatter have none
            self._completes_in_wait = True
            recorder.completes_in_wait(ticket)
        else:
            self._completes_in_wait = False
            future.add_done_callback(lambda _: recorder.completed(ticket))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._recorder.blocked(self._ticket):
            done = self._real.wait(timeout)
        if self._completes_in_wait:
            self._recorder.completed(self._ticket)
        return done


class SettledWork(_PassedOn):
    """It returns a moment late from waiting: a thread of gloo's that has done the work lets go of its tensors after it
    has told so. Were it the last to do that, the memory instrument would not see them go."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._real.wait(timeout)
        time.sleep(_SETTLING_SECONDS)
        return done


class NullWork(Work):
    """Completed from the start; its future holds the tensors as they are."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._results = list(results)
        devices: list[Any] = sorted({tensor.device for tensor in self._results if tensor.is_cuda}, key=str)
        self._future: Future[list[Tensor]] = Future(devices=devices)
        self._future.set_result(self._results)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._results

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None

    def source_rank(self) -> int:
        return 0

    def _source_rank(self) -> int:
        return 0


class DelayedWork(Work):
    """Real work that somebody launches later; until then it is in flight like any other. `call` gives the work, or None
    if all is done by the time it returns. For tensors on the CPU: a launch from another thread is on no CUDA stream of
    the caller's."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call
        self._is_launched = threading.Event()
        self._real: Work | None = None
        self._error: BaseException | None = None
        # Whoever waits in C++ (DDP's reducer) has this one and nothing else.
        self._future: Future[Any] = Future()

    def launch(self) -> None:
        """Calls the real operation. What goes wrong is raised where it is waited for."""
        try:
            with torch.no_grad():  # as autograd's own threads have it; this one's mode is nobody's wish
                self._real = self._call()
            if self._real is None:
                self._future.set_result([])
            else:
                self._real.get_future().add_done_callback(self._pass_on)
        except BaseException as error:
            # A launched work without a future has one that fails: so does asking the work itself for one.
            self._error = error if self._real is None else None
            self._future.set_exception(error)
        self._is_launched.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        real = self._launched()
        return True if real is None else real.wait(timeout)

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return self._is_launched.is_set() and (self._real is None or self._real.is_completed())

    def is_success(self) -> bool:
        return self._error is None and self.is_completed() and (self._real is None or self._real.is_success())

    def exception(self) -> Any:
        return self._error if self._real is None else self._real.exception()

    def result(self) -> list[Tensor]:
        real = self._launched()
        return [] if real is None else real.result()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        real = self._launched()
        return 0 if real is None else real.source_rank()

    def _source_rank(self) -> int:
        real = self._launched()
        return 0 if real is None else real._source_rank()

    def _launched(self) -> Work | None:
        self._is_launched.wait()
        if self._error is not None:
            raise self._error
        return self._real

    def _pass_on(self, done: Future[Any]) -> None:
        try:
            value = done.value()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(value)
