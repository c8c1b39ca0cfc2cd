"""Environments: what differs is installed beside what is there, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.paired import builds
from harness.paired.environments import Environment, is_met, requirements_of


def wheel(directory: Path, version: str) -> None:
    """A library of one module that tells its version; it asks for numpy, as libraries do."""
    files = {
        "ownlib.py": f"__version__ = {version!r}\n",
        f"ownlib-{version}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: ownlib\nVersion: {version}\nRequires-Dist: numpy\n"
        ),
        f"ownlib-{version}.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(text.encode())}")
    files[f"ownlib-{version}.dist-info/RECORD"] = "\n".join([*rows, f"ownlib-{version}.dist-info/RECORD,,"]) + "\n"
    with zipfile.ZipFile(directory / f"ownlib-{version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def test_two_versions_of_a_library_beside_everything_else_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1.0", "2.0"):
        wheel(tmp_path, version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    told: list[str] = []
    script = "import importlib.metadata, numpy, ownlib; print(ownlib.__version__, numpy.__file__)"
    with builds.of_peers(("ownlib==1.0", "ownlib==2.0"), told.append) as sides:
        shown = [
            subprocess.run([side.python, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
            for side in sides
        ]
        sizes = [sum(1 for _ in side.python.parents[1].rglob("ownlib*")) for side in sides]
    import numpy as np

    assert [line.split() for line in shown] == [["1.0", np.__file__], ["2.0", np.__file__]]
    assert told == ["installing ownlib==1.0", "installing ownlib==2.0"]
    assert all(sizes)
    assert not any(side.python.exists() for side in sides)


def test_a_library_that_cannot_be_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"No matching distribution found for ownlib==3.0"):
        Environment.with_library("ownlib==3.0", tmp_path, tmp_path, lambda text: None)


def test_what_is_there_is_not_installed_again(tmp_path: Path) -> None:
    def untold(text: str) -> None:
        raise AssertionError(text)

    assert Environment.for_requirements(("numpy>=1", "pytest"), tmp_path, untold).python == Path(sys.executable)


def test_what_a_revision_needs_are_its_dependencies_and_what_constrains_them(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=2", "numpy"]\n')
    (tmp_path / "constraints.txt").write_text("# one torch\ntorch==2.13.0\nother==1\n")
    assert requirements_of(tmp_path) == ("numpy", "torch==2.13.0", "torch>=2")
    (tmp_path / "pyproject.toml").write_text("[tool.x]\n")
    with pytest.raises(ValueError, match="expected the project's dependencies, got KeyError"):
        requirements_of(tmp_path)


def test_what_is_met() -> None:
    assert is_met("numpy")
    assert is_met("no-such-library; python_version < '3'")
    assert not is_met("numpy<1")
    assert not is_met("no-such-library")
    with pytest.raises(ValueError, match=r"expected a requirement such as deepspeed==0.19.8, got '!'"):
        is_met("!")
