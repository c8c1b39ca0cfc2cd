"""A tracking server that is down, silent or slow, or whose database is locked: the results stay, a line says so, and a
later upload brings the rest."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.case import Case
from harness.layout import Layout
from harness.result import Result, append
from harness.tracking import read_runs, upload
from tests.faults.conftest import record

pytestmark = pytest.mark.faults

NUM_RESULTS = 4
LATER = "Nothing is lost: `meshmark upload"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    results = tmp_path / "results"
    results.mkdir()
    for degree in range(1, NUM_RESULTS + 1):
        case = Case(workload="gpt:size=tiny", implementation="native.ddp", layout=Layout(data=degree))
        metrics = {"step.median_seconds": 0.1 * degree}
        append(results, Result(case=case, status="ok", suite="s", suite_run="s-1", started=1.0, metrics=metrics))
    return results


@contextlib.contextmanager
def listening(serve: object) -> Iterator[int]:
    """A port whose every connection `serve` takes, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()  # type: ignore[arg-type]

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


def test_a_server_that_is_down(directory: Path) -> None:
    began = time.monotonic()
    told = upload(directory, tracking_uri="http://127.0.0.1:1")
    assert (told.uploaded, told.failed) == (0, NUM_RESULTS + 1)
    assert LATER in told.message
    record("MLflow down", "ok; one line", time.monotonic() - began, 20.0)


def test_a_server_that_never_answers(directory: Path) -> None:
    held: list[socket.socket] = []
    began = time.monotonic()
    with listening(held.append) as port:
        told = upload(directory, tracking_uri=f"http://127.0.0.1:{port}")
    assert (told.uploaded, told.failed) == (0, NUM_RESULTS + 1)
    assert LATER in told.message
    assert "\n" not in told.message
    for connection in held:
        connection.close()
    record("MLflow silent", "ok; one line", time.monotonic() - began, 60.0)


def test_a_server_that_is_slow_is_not_waited_for_for_ever(directory: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    log = (tmp_path / "server.log").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1",
         "--backend-store-uri", f"sqlite:///{tmp_path}/store.db", "--artifacts-destination", f"{tmp_path}/artifacts"],
        stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip

    def slowly(client: socket.socket) -> None:
        """Each piece of a request is held up for half a second."""
        with client, socket.create_connection(("127.0.0.1", port)) as there, contextlib.suppress(OSError):
            threading.Thread(target=pump, args=(there, client), daemon=True).start()
            while piece := client.recv(65536):
                time.sleep(0.5)
                there.sendall(piece)

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                sink.sendall(piece)

    try:
        _until_it_answers(port)
        with listening(slowly) as slow:
            began = time.monotonic()
            told = upload(directory, tracking_uri=f"http://127.0.0.1:{slow}", within_seconds=3.0)
            seconds = time.monotonic() - began
        assert told.failed > 0, told.message
        assert "the store is slow, and took more than 3 s" in told.message
        assert LATER in told.message
        direct = f"http://127.0.0.1:{port}"
        assert upload(directory, tracking_uri=direct).failed == 0
        assert len(read_runs(tracking_uri=direct)) == NUM_RESULTS + 1
    finally:
        server.terminate()
        server.wait(20)
        log.close()
    record("MLflow slow, with 3 s to upload", "ok; one line, the rest by `meshmark upload`", seconds, 30.0)


def _until_it_answers(port: int) -> None:
    ends = time.monotonic() + 90
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            assert time.monotonic() < ends, "MLflow's server does not start"
            time.sleep(0.3)


def test_a_database_that_is_locked(directory: Path, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    with contextlib.suppress(ConnectionError):
        upload(directory, tracking_uri=store)
    append(directory, Result(case=Case(workload="gpt", implementation="torch.ddp", layout=Layout(data=2)),
                             status="ok", suite="s", suite_run="s-1", started=1.0))  # fmt: skip
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        told = upload(directory, tracking_uri=store)
        seconds = time.monotonic() - began
        holder.execute("ROLLBACK")
    assert told.failed > 0
    assert "database is locked" in told.message
    assert LATER in told.message
    assert upload(directory, tracking_uri=store).failed == 0
    assert len(read_runs(tracking_uri=store)) == NUM_RESULTS + 2
    record("MLflow's database locked", "ok; one line", seconds, 60.0)
