"""Environments: a Python that has what a build asks for, with as little installed as can be.

The Python at hand serves as it is where it meets a revision's requirements. Otherwise a virtual environment is made
that sees all of its packages behind those of its own, so that only what differs is installed: not torch a second time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import signal
import site
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

_CONSTRAINTS = "constraints.txt"
_NUM_LINES_TOLD = 2


@dataclass(frozen=True, kw_only=True)
class Environment:
    python: Path

    @classmethod
    def for_requirements(cls, requirements: Sequence[str], directory: Path, tell: Callable[[str], None]) -> Environment:
        """One that meets `requirements`: the Python at hand if that does. ValueError if they cannot be installed."""
        missing = [requirement for requirement in requirements if not is_met(requirement)]
        if not missing:
            return cls(python=Path(sys.executable))
        tell(f"installing {', '.join(missing)}")
        return cls._beside_this_one(directory, requirements)

    @classmethod
    def with_library(cls, requirement: str, directory: Path, source: Path, tell: Callable[[str], None]) -> Environment:
        """One with another version of a library; whatever that needs besides obeys the constraints of `source`."""
        if is_met(requirement):
            return cls(python=Path(sys.executable))
        tell(f"installing {requirement}")
        name = Requirement(requirement).name
        constraints = [line for line in _constraints(source) if Requirement(line).name != name]
        return cls._beside_this_one(directory, [requirement], constraints)

    @classmethod
    def _beside_this_one(
        cls, directory: Path, requirements: Sequence[str], constraints: Sequence[str] = ()
    ) -> Environment:
        name = hashlib.sha256("\n".join([*requirements, *constraints]).encode()).hexdigest()[:8]
        path = directory / f"environment-{name}"
        # Without pip of its own: not every system brings what would install one, and it sees the parent's.
        _run([sys.executable, "-m", "venv", "--without-pip", str(path)])
        python = path / "bin" / "python"
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(path), "platbase": str(path)}))
        # What a .pth file names comes behind the environment's own packages.
        seen = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_system_packages()]
        (packages / "packages-of-the-parent.pth").write_text("\n".join(dict.fromkeys(seen)) + "\n")
        constrained = path / _CONSTRAINTS
        constrained.write_text("\n".join(constraints) + "\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--constraint", str(constrained), *requirements])
        return cls(python=python)


def requirements_of(source: Path) -> tuple[str, ...]:
    """What the revision checked out at `source` needs to run, sorted: its dependencies and their constraints.
    ValueError if its pyproject.toml does not say."""
    path = source / "pyproject.toml"
    try:
        dependencies = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["dependencies"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: expected the project's dependencies, got {type(error).__name__}: {error}") from error
    names = {Requirement(dependency).name for dependency in dependencies}
    return tuple(sorted({*dependencies, *(line for line in _constraints(source) if Requirement(line).name in names)}))


def is_met(requirement: str) -> bool:
    """Whether this Python's packages meet it. ValueError if it is none."""
    try:
        wanted = Requirement(requirement)
    except InvalidRequirement as error:
        raise ValueError(f"expected a requirement such as deepspeed==0.19.8, got {requirement!r}: {error}") from None
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    try:
        return wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def _constraints(source: Path) -> list[str]:
    path = source / _CONSTRAINTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _system_packages() -> list[str]:
    """Those of the Python that this environment was made with, where it sees them itself."""
    return [path for path in site.getsitepackages() if path in sys.path]


def _run(command: Sequence[str]) -> None:
    """ValueError, with the last lines it wrote, if it fails. Whatever it started ends when this is interrupted."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        told = " ".join(output.strip().splitlines()[-_NUM_LINES_TOLD:])
        raise ValueError(f"{' '.join(command[1:4])} failed: {told}")
