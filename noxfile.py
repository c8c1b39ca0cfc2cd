"""What a checkout can do: `nox -s smoke`, `nox -s tests`, `nox -s lint`, `nox -s peers`, `nox -s sharding`,
`nox -s topologies`, `nox -s baselines`, `nox -s slurm`, `nox -s faults`, `nox -s browser`, `nox -s conformance`,
`nox -s micro`, `nox -s paired`, `nox -s change_points`, `nox -s server`.

All sessions share the virtual environment .venv, so torch is installed once; nox itself gives each session its own, so
they run with `python=False` and name .venv's commands. It is installed again only when pyproject.toml or
constraints.txt has changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tomllib
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.options.sessions = ["smoke", "tests", "lint"]

ENVIRONMENT = Path(".venv")
COMMANDS = ENVIRONMENT / "bin"
EXTRAS = ("browser", "dashboards", "hf", "lint", "test")
# Each process begins with its own half of the tests, in order, so that neighbours share their worlds of ranks; whoever
# is done first helps the other. One alone leaves processors idle: it waits for processes to start and for deadlines.
SIDE_BY_SIDE = ("--numprocesses", "2", "--dist", "worksteal")
OTAVA = Path(".nox/otava")
BENCHMARKS = Path(".benchmarks")
LATEST_BENCHMARKS = BENCHMARKS / "latest.json"
IMPATIENT = ("-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=60")
INSTALLED_FROM = ("pyproject.toml", "constraints.txt")


@nox.session(python=False)
def smoke(session: nox.Session) -> None:
    """The main job: every smoke case held against one process, a table, results.jsonl, MLflow. Arguments go along."""
    install(session)
    session.run(f"{COMMANDS}/meshmark", "run", "smoke", *session.posargs)


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """The tests. Arguments go to pytest: nox -s tests -- tests/harness -k layout."""
    install(session)
    session.run(f"{COMMANDS}/pytest", *(session.posargs or SIDE_BY_SIDE))


@nox.session(python=False)
def conformance(session: nox.Session) -> None:
    """Every implementation and option on every awkward workload and layout, some 3,500 cases, and what else the tests
    do by turns."""
    install(session)
    session.run(f"{COMMANDS}/pytest", "-m", "exhaustive", *session.posargs)


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Style and types."""
    install(session)
    session.run(f"{COMMANDS}/ruff", "check", ".")
    session.run(f"{COMMANDS}/ruff", "format", "--check", ".")
    session.run(f"{COMMANDS}/mypy")


@nox.session(python=False)
def peers(session: nox.Session) -> None:
    """Ours timed beside other people's, in rounds that take turns, and the ratio table. Wants a quiet machine."""
    install(session)
    install_peers(session)
    session.run(f"{COMMANDS}/meshmark", "run", "peers", *session.posargs)


@nox.session(python=False)
def baselines(session: nox.Session) -> None:
    """The tests of DeepSpeed's and FairScale's implementations. Arguments go to pytest."""
    install(session)
    install_peers(session)
    session.run(f"{COMMANDS}/pytest", "-m", "baselines", *(session.posargs or SIDE_BY_SIDE))


@nox.session(python=False)
def slurm(session: nox.Session) -> None:
    """Ranks that torchrun's agents and a real Slurm of two nodes start, on this machine. Debian's packages are
    installed where root may; without them those tests are skipped and say so."""
    install(session)
    install_from_debian(session, "slurmctld", "slurmctld", "slurmd", "slurm-client", "munge")
    session.run(f"{COMMANDS}/pytest", "-m", "cluster", *(session.posargs or ["tests/harness"]))


@nox.session(python=False)
def micro(session: nox.Session) -> None:
    """Micro-benchmarks of single mechanisms, beside what this machine has saved before, and into MLflow. Arguments go
    to pytest: nox -s micro -- -k all_reduce."""
    install(session)
    saved = any(BENCHMARKS.glob("*/*.json"))
    session.run(
        f"{COMMANDS}/pytest",
        "suites/micro",
        f"--benchmark-storage={BENCHMARKS}",
        "--benchmark-autosave",
        f"--benchmark-json={LATEST_BENCHMARKS}",
        "--benchmark-columns=median,iqr,min,rounds",
        "--benchmark-sort=name",
        *(["--benchmark-compare"] if saved else []),
        *session.posargs,
    )
    try:
        session.run(f"{COMMANDS}/meshmark", "upload", str(LATEST_BENCHMARKS))
    except CommandFailed:
        session.warn(f"not in MLflow; later: meshmark upload {LATEST_BENCHMARKS}")


@nox.session(python=False)
def paired(session: nox.Session) -> None:
    """Two revisions of this project timed in turns: a slowdown of 15 % that must be found, and none where there is
    none. Minutes, on a quiet machine. Arguments go to pytest."""
    install(session)
    session.run(f"{COMMANDS}/pytest", "-m", "paired", "-s", *(session.posargs or ["tests/harness/paired"]))


@nox.session(python=False)
def server(session: nox.Session) -> None:
    """Everything that goes through a team's MLflow server, on a PostgreSQL of its own. Debian's is installed where root
    may; without one those tests are skipped and say so. Arguments go to pytest."""
    install(session)
    session.run(f"{COMMANDS}/python", "-m", "pip", "install", "-c", "constraints.txt", *_extra("server"))
    install_from_debian(session, "initdb", "postgresql")
    session.run(f"{COMMANDS}/pytest", "-m", "server", *(session.posargs or ["tests/harness/server"]))


@nox.session(python=False)
def change_points(session: nox.Session) -> None:
    """Our change points beside those of Apache Otava, on the same series. It pins an old numpy, and so has an
    environment of its own. Arguments go to pytest."""
    install(session)
    python = OTAVA / "bin" / "python"
    if not python.exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(OTAVA))
        session.run(str(python), "-m", "pip", "install", "--quiet", "apache-otava==0.8.0")
    session.run(
        f"{COMMANDS}/pytest",
        "-m",
        "otava",
        *(session.posargs or ["tests/harness/regression"]),
        env={"MESHMARK_OTAVA_PYTHON": str(python.absolute())},
    )


@nox.session(python=False)
def browser(session: nox.Session) -> None:
    """Dashboards in a headless Chromium. Debian's is installed where root may; without one those tests are skipped and
    say so."""
    install(session)
    install_from_debian(session, "chromium", "chromium")
    session.run(f"{COMMANDS}/pytest", "-m", "browser", *(session.posargs or ["tests/dashboards"]))


@nox.session(python=False)
def faults(session: nox.Session) -> None:
    """Ranks, links, agents, disks and servers that fail for real, and a table of how soon each is noticed. What needs
    root, namespaces or cgroups is skipped where they are not to be had, and says so."""
    install(session)
    session.run(f"{COMMANDS}/pytest", "-m", "faults", *(session.posargs or ["tests/faults"]))


@nox.session(python=False)
def sharding(session: nox.Session) -> None:
    """Data parallel beside sharded optimizers, and the page that compares them. An argument names the directory."""
    install(session)
    directory = session.posargs[0] if session.posargs else "results/sharding"
    session.run(f"{COMMANDS}/meshmark", "run", "sharding", "--results", directory)
    session.run(f"{COMMANDS}/meshmark", "compare", directory, "--out", f"{directory}/comparison.md")


@nox.session(python=False)
def topologies(session: nox.Session) -> None:
    """Every strategy over emulated nodes and links, and the page about them. An argument names the directory."""
    install(session)
    directory = session.posargs[0] if session.posargs else "results/topologies"
    session.run(f"{COMMANDS}/meshmark", "run", "topologies", "--results", directory)
    session.run(f"{COMMANDS}/meshmark", "compare", directory, "--out", f"{directory}/topologies.md")


def install(session: nox.Session) -> None:
    """Make .venv and install this checkout into it with every extra, unless it already holds exactly that."""
    python, stamp = COMMANDS / "python", ENVIRONMENT / "installed-from"
    wanted = hashlib.sha256(b"".join(Path(name).read_bytes() for name in INSTALLED_FROM)).hexdigest()
    if python.exists() and stamp.is_file() and stamp.read_text() == wanted:
        session.log(f"{ENVIRONMENT} is up to date with {' and '.join(INSTALLED_FROM)}")
        return
    if not python.exists():
        # virtualenv comes with nox; the standard library's venv is a package of its own on some systems.
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(ENVIRONMENT))
    extras = ",".join(EXTRAS)
    session.run(str(python), "-m", "pip", "install", "-c", "constraints.txt", "-e", f".[{extras}]")
    stamp.write_text(wanted)


def install_peers(session: nox.Session) -> None:
    """DeepSpeed and FairScale, pinned, each on its own: where one cannot be installed, its rows say unavailable."""
    for requirement in _extra("peers"):
        try:
            session.run(f"{COMMANDS}/python", "-m", "pip", "install", "-c", "constraints.txt", requirement)
        except CommandFailed:
            session.warn(f"{requirement} cannot be installed here: its cases will say unavailable")


def install_from_debian(session: nox.Session, command: str, *packages: str) -> None:
    """Debian's packages, where `command` is missing and root may install them; elsewhere nothing happens. Without a
    network a line says so; tests that need them say what they lack, and are skipped."""
    apt = shutil.which("apt-get")
    there = shutil.which(command) or any(Path("/usr/lib/postgresql").glob(f"*/bin/{command}"))
    if there or apt is None or os.geteuid() != 0:
        return
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        try:
            session.run(apt, "-qq", *IMPATIENT, *arguments, env={"DEBIAN_FRONTEND": "noninteractive"}, external=True)
        except CommandFailed:
            session.warn(f"apt-get {arguments[0]} fails here, and {command} may be missing")


def _extra(name: str) -> list[str]:
    """What an optional extra asks for."""
    extras: dict[str, list[str]] = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    return extras[name]
