"""A delay line on its own: what comes out, when, and in which order."""

from __future__ import annotations

import threading
import time

from harness.measure.delay_line import DelayLine


def test_delays_run_side_by_side_and_hold_up_nobody() -> None:
    line = DelayLine()
    came_out: list[tuple[int, float]] = []
    begin = time.perf_counter()
    for number in range(5):
        line.put(lambda number=number: came_out.append((number, time.perf_counter() - begin)), 0.3)
    assert time.perf_counter() - begin < 0.3
    line.drain()
    assert [number for number, _ in came_out] == [0, 1, 2, 3, 4]
    assert all(0.3 <= seconds < 0.6 for _, seconds in came_out)  # one after another it would be 1.5 s
    line.drain()  # nothing is left


def test_nothing_overtakes_and_draining_waits_for_what_is_being_carried_out() -> None:
    line = DelayLine()
    order: list[str] = []
    busy = threading.Event()

    def slow() -> None:
        busy.set()
        time.sleep(0.1)
        order.append("slow")

    line.put(slow, 0.05)
    line.put(lambda: order.append("quick"), 0.0)
    assert busy.wait(5)
    line.drain()
    assert order == ["slow", "quick"]
