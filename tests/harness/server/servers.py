"""A PostgreSQL cluster and an MLflow server with users, both private to a test and gone after it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from harness.launch.fork_server import end_with_parent
from tests.ports import free_port

ADMIN = "admin"
_START_SECONDS = 120.0


def postgres_commands() -> Path | None:
    """Where `initdb` and `postgres` lie: on the path, or where Debian keeps them, the newest version."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return versions[-1].parent if versions else None


def unprivileged() -> dict[str, Any]:
    """PostgreSQL does not run as root: as whom, for subprocess."""
    return {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}


@contextlib.contextmanager
def postgres(log: Path) -> Iterator[str]:
    """A cluster of its own, in a directory of its own; yields the URI of its server, to which a database's name is
    added. What it says goes to `log`."""
    commands = postgres_commands()
    assert commands is not None
    given = unprivileged()
    # Not among pytest's directories: they are for whoever runs the tests alone, and each pytest that starts on the
    # machine makes sure of that, while another one's cluster is in use.
    with tempfile.TemporaryDirectory(prefix="meshmark-postgres-") as name:
        directory = Path(name)
        data, port, password = directory / "data", free_port(), secrets.token_hex(8)
        secret = directory / "password"
        secret.write_text(password)
        if given:
            for path in (directory, secret):
                shutil.chown(path, given["user"])
        initialise = [commands / "initdb", "--pgdata", data, "--username", "meshmark", "--pwfile", secret]
        made = subprocess.run(
            [*initialise, "--auth", "scram-sha-256", "--no-sync"],
            check=False,
            capture_output=True,
            text=True,
            timeout=_START_SECONDS,
            cwd=directory,
            **given,
        )
        assert made.returncode == 0, made.stderr
        settings = ("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off")
        with (
            log.open("w") as output,
            subprocess.Popen(
                [commands / "postgres", "-D", data, "-p", str(port), *settings],
                stdout=subprocess.DEVNULL,
                stderr=output,
                cwd=directory,
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509  nothing else ends it with a test that is killed
                **given,
            ) as process,
        ):
            try:
                place = f"meshmark:{password}@127.0.0.1:{port}"
                _until(process, lambda: _answers(port), log)
                for database in ("tracking", "users"):
                    _create_database(f"postgresql://{place}/postgres", database)
                yield f"postgresql+psycopg2://{place}"  # without the driver's name SQLAlchemy 2.1 looks for psycopg 3
            finally:
                process.send_signal(signal.SIGINT)  # a fast shutdown: it does not wait for clients
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()


def _create_database(uri: str, name: str) -> None:
    import psycopg2

    deadline = time.monotonic() + 30
    while True:
        try:
            connection = psycopg2.connect(uri)
            break
        except psycopg2.OperationalError:  # it answers before it takes anyone in
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    with contextlib.closing(connection):
        connection.autocommit = True  # no database is made within a transaction
        connection.cursor().execute(f"CREATE DATABASE {name}")


@dataclass(kw_only=True)
class Server:
    """An MLflow server that answers at `uri`, and what it has been asked for."""

    uri: str
    admin_password: str
    log: Path

    def add_user(self, name: str, password: str) -> None:
        self._ask("2.0/mlflow/users/create", {"username": name, "password": password})

    def requests(self) -> Counter[str]:
        """How often each part of the interface was called: `runs/log-batch` and so on."""
        calls = re.findall(r'"[A-Z]+ /(?:ajax-)?api/[\d.]+/mlflow[^/]*/(\S+?)[? ]', self.log.read_text())
        return Counter("artifacts" if call.startswith("artifacts") else call for call in calls)

    def _ask(self, path: str, content: dict[str, str]) -> None:
        request = urllib.request.Request(f"{self.uri}/api/{path}", data=dumps(content).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", basic(ADMIN, self.admin_password))
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200


def basic(name: str, password: str) -> str:
    return "Basic " + b64encode(f"{name}:{password}".encode()).decode()


@contextlib.contextmanager
def mlflow_server(directory: Path, database: str) -> Iterator[Server]:
    """`mlflow server --app-name basic-auth` as README has it, on the databases at `database`."""
    directory.mkdir()
    port, password, log = free_port(), secrets.token_hex(8), directory / "server.log"
    configuration = directory / "basic_auth.ini"
    configuration.write_text(
        "[mlflow]\n"
        "default_permission = EDIT\n"
        f"database_uri = {database}/users\n"
        f"admin_username = {ADMIN}\n"
        f"admin_password = {password}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "1"]
    command += ["--backend-store-uri", f"{database}/tracking", "--artifacts-destination", str(directory / "artifacts")]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {
        **os.environ,
        "MLFLOW_AUTH_CONFIG_PATH": str(configuration),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(16),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PYTHONWARNINGS": "ignore",
    }
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  nothing else ends it with a test that is killed
        ) as process,
    ):
        try:
            _until(process, lambda: _healthy(port), log)
            yield Server(uri=f"http://127.0.0.1:{port}", admin_password=password, log=log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # it starts others, which need not end with it


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _until(process: subprocess.Popen[bytes], is_ready: Any, log: Path | None = None) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not is_ready():
        told = log.read_text()[-2000:] if log else ""
        assert process.poll() is None, f"it ended with {process.returncode}: {told}"
        assert time.monotonic() < deadline, f"it does not answer: {told}"
        time.sleep(0.2)
