"""A Slurm cluster of two nodes on this machine, with its own key, ports and files; nothing of it outlives the tests."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launch.fork_server import end_with_parent

NODES = ("n0", "n1")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
_UP_SECONDS = 60.0


def missing() -> str | None:
    """Why there can be no cluster here, or None."""
    if absent := [name for name in _PROGRAMS if not _found(name)]:
        return f"Slurm is not installed here: no {', '.join(absent)}"
    if os.geteuid() != 0:
        return "slurmd has to run as root"
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return f"Slurm's nodes go by this machine's name, {socket.gethostname()}, which cannot be looked up: {error}"
    return None


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[dict[str, str]]:
    """While inside, both nodes are idle at first; yields the environment in which Slurm's commands find them."""
    key, munge_socket, configuration = directory / "munge.key", directory / "munge.socket", directory / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    ports = _free_ports(1 + len(NODES))
    configuration.write_text(_configuration(directory, munge_socket, ports))
    environment = {"SLURM_CONF": str(configuration)}
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> None:
        with (directory / f"{name}-{len(running)}.log").open("wb") as log:
            running.append(
                subprocess.Popen(
                    [_found(name) or name, *arguments],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    preexec_fn=end_with_parent,  # noqa: PLW1509  tests that are killed leave no daemon
                )
            )

    try:
        start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}",
              f"--pid-file={directory / 'munged.pid'}", f"--seed-file={directory / 'munged.seed'}",
              f"--log-file={directory / 'munged.log'}")  # fmt: skip
        _until(munge_socket.exists, "munged does not come up", directory)
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        _until(lambda: _idle(environment) == len(NODES), "the nodes do not become idle", directory)
        yield environment
    finally:
        for process in reversed(running):
            process.terminate()
        for process in reversed(running):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _end_all_with(f"SLURM_CONF={configuration}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slurm's commands find a cluster of two nodes."""
    if reason := missing():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm")) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


def _configuration(directory: Path, munge_socket: Path, ports: list[int]) -> str:
    host = socket.gethostname()
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000 State=UNKNOWN"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    return "\n".join(
        [
            "ClusterName=meshmark",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={munge_socket}",
            "CredType=cred/munge",
            f"StateSaveLocation={directory / 'state'}",
            f"SlurmdSpoolDir={directory / 'spool-%n'}",
            f"SlurmctldPidFile={directory / 'slurmctld.pid'}",
            f"SlurmdPidFile={directory / 'slurmd-%n.pid'}",
            f"SlurmctldLogFile={directory / 'slurmctld.log'}",
            f"SlurmdLogFile={directory / 'slurmd-%n.log'}",
            "SelectType=select/cons_tres",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SlurmdParameters=config_overrides",
            "MpiDefault=none",
            "ReturnToService=2",
            *nodes,
            f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP",
            "",
        ]
    )


def _idle(environment: dict[str, str]) -> int:
    told = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    return told.stdout.split().count("idle")


def _end_all_with(setting: str) -> None:
    """Ends the steps of jobs that a test has left, which outlive Slurm's daemons; all have its setting."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if setting.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    """Below those that the system gives to whoever asks for any, ranks say: nobody takes them until Slurm does."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 1000):
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def _until(condition, what: str, directory: Path) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + _UP_SECONDS
    while not condition():
        if time.monotonic() > until:
            logs = "\n".join(f"{path.name}: {path.read_text()[-600:]}" for path in directory.glob("*.log"))
            raise AssertionError(f"{what} within {_UP_SECONDS:g} s\n{logs}")
        time.sleep(0.1)
