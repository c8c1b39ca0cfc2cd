"""A side's session: what it is told of where its code, its commands and its compiled operators lie."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from harness.paired.builds import Build
from harness.paired.side import Side


def environment(directory: Path, python: Path) -> dict[str, str]:
    build = Build(name="x==1", commit="", source=directory / "source", python=python, scratch=directory / "a")
    return Side(build)._environment()


def test_another_python_compiles_operators_of_its_own(tmp_path: Path) -> None:
    """Two versions of a library compile theirs by the same names, and torch builds anew what comes from elsewhere."""
    other = environment(tmp_path, tmp_path / "bin" / "python")
    assert other["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "a" / "operators")
    here = environment(tmp_path, Path(sys.executable))
    assert here.get("TORCH_EXTENSIONS_DIR") == os.environ.get("TORCH_EXTENSIONS_DIR"), "what was compiled before serves"


def test_a_builds_code_and_commands_come_first(tmp_path: Path) -> None:
    found = environment(tmp_path, tmp_path / "bin" / "python")
    assert found["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "source")
    assert found["PATH"].split(os.pathsep)[:2] == [str(tmp_path / "bin"), str(Path(sys.executable).parent)]
