"""Whether the library can be used is told without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from impls.deepspeed.parts import library


def pretend(directory: Path, version: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a package of that name before the installed one, for this process and those that it starts."""
    (directory / "deepspeed").mkdir()
    (directory / "deepspeed/__init__.py").write_text(source)
    metadata = directory / f"deepspeed-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PYTHONPATH", str(directory))


def test_a_missing_library_says_how_to_install_it() -> None:
    if importlib.util.find_spec("deepspeed") is not None:
        pytest.skip("DeepSpeed is installed")
    assert library.why_not_usable.__wrapped__() == "deepspeed is not installed: pip install 'deepspeed==0.19.*'"


def test_another_release_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, "0.18.4", "raise AssertionError('imported')", monkeypatch)
    assert library.why_not_usable.__wrapped__() == "DeepSpeed 0.18.4 is installed, expected 0.19"


def test_a_broken_one_gives_the_last_line_of_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import sys\nprint('noise', file=sys.stderr)\nfrom torch import no_such_thing\n"
    pretend(tmp_path, "0.19.8", source, monkeypatch)
    reason = library.why_not_usable.__wrapped__()
    assert reason is not None
    assert reason.startswith("DeepSpeed 0.19.8 with torch ")
    assert "ImportError: cannot import name 'no_such_thing'" in reason
    assert "noise" not in reason


def test_what_cannot_be_compiled_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "raise RuntimeError('no compiler here')"
    pretend(tmp_path, "0.19.8", source, monkeypatch)
    with pytest.raises(RuntimeError, match=r"cannot compile ShareMemCommBuilder: RuntimeError: no compiler here"):
        library.compile_for_ranks()
