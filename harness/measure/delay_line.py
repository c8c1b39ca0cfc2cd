"""A longer link: what is put into it is carried out a fixed time later, in order, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Queue


class DelayLine:
    """Delays run side by side, as on a long link, and hold up nobody: of k operations put in at once the last comes out
    one delay later, not k. Its thread starts with the first of them and ends with the process.

        in     a b       c
        out    . . . a b . . . c        3 columns a delay
    """

    def __init__(self) -> None:
        self._queue: Queue[tuple[float, Callable[[], None]]] = Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, launch: Callable[[], None], delay_seconds: float) -> None:
        """Calls `launch`, which must not raise, in `delay_seconds`, and not before what was put in earlier."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._carry_out, name="meshmark delay line", daemon=True)
                self._thread.start()
            self._queue.put((time.perf_counter() + delay_seconds, launch))

    def drain(self) -> None:
        """Returns once everything has been carried out."""
        self._queue.join()

    def _carry_out(self) -> None:
        while True:
            due, launch = self._queue.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            launch()
            self._queue.task_done()
