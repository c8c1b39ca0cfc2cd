"""Callers with and without the key, on sockets of this machine and on ports."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from queue import Queue
from typing import Any

import pytest

from harness.launch.calls import Calls
from harness.launch.torchrun import _calls, _written


@pytest.fixture(params=[None, ("", 0)], ids=["socket", "port"])
def taken_calls(request: pytest.FixtureRequest) -> Iterator[tuple[Calls, Queue[tuple[Any, Connection]]]]:
    taken: Queue[tuple[Any, Connection]] = Queue()
    calls = Calls(request.param, "key", lambda *call: taken.put(call), backlog=4)
    yield calls, taken
    calls.close()


def connected(calls: Calls) -> socket.socket:
    if isinstance(calls.address, str):
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(calls.address)
        except OSError:
            line.close()
            raise
        return line
    return socket.create_connection(("127.0.0.1", calls.address[1]))


def called(calls: Calls, words: object, key: bytes = b"key") -> Connection:
    line = Client(calls.address if isinstance(calls.address, str) else ("127.0.0.1", calls.address[1]), authkey=key)
    line.send(words)
    return line


def test_whoever_says_nothing_holds_nobody_up(taken_calls: tuple[Calls, Queue[tuple[Any, Connection]]]) -> None:
    calls, taken = taken_calls
    with connected(calls), called(calls, "a rank") as there:
        words, here = taken.get(timeout=10.0)
        here.send("welcome")
        assert there.poll(10.0)
        assert (words, there.recv()) == ("a rank", "welcome")


def test_without_the_key_nobody_is_taken(taken_calls: tuple[Calls, Queue[tuple[Any, Connection]]]) -> None:
    calls, taken = taken_calls
    with pytest.raises(Exception, match="digest"):
        called(calls, "a stranger", b"another")
    with called(calls, "a rank"):
        assert taken.get(timeout=10.0)[0] == "a rank"


def test_after_the_end_nobody_listens_and_no_thread_waits(
    taken_calls: tuple[Calls, Queue[tuple[Any, Connection]]],
) -> None:
    calls, taken = taken_calls
    calls.close()
    with pytest.raises((ConnectionError, FileNotFoundError)):
        connected(calls)
    assert calls._accepting not in threading.enumerate()
    if not isinstance(calls.address, str):
        with socket.socket() as again:
            again.bind(("", calls.address[1]))
    assert taken.empty()


def test_other_nodes_find_the_harness_whatever_its_name_means_to_itself() -> None:
    """127.0.1.1 on Debian, say. 127.0.0.2 is how others know it here."""
    calls = _calls("localhost", "key", lambda *_call: None, backlog=1)
    assert _written(calls.address, "node-0") == f"node-0:{calls.address[1]}"
    with socket.create_connection(("127.0.0.2", calls.address[1]), timeout=5.0):
        pass
    calls.close()
