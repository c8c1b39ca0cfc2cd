"""Whether the library can be used is told without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    library._error_of_compiling.cache_clear()
    yield
    library._error_of_compiling.cache_clear()


@pytest.mark.parametrize("folder", ["another", "deepspeed"])
def test_a_missing_library_says_how_to_install_it(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a folder of its name, such as a clone's, stand for it."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not any(Path(entry).glob("deepspeed*"))])
    (tmp_path / folder).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert library.why_not_usable.__wrapped__() == "deepspeed is not installed: pip install 'deepspeed==0.19.*'"


def test_one_that_does_not_tell_its_release_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, "0.19.8", "raise AssertionError('imported')", monkeypatch)
    (tmp_path / "deepspeed-0.19.8.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\n")
    assert library.why_not_usable.__wrapped__() == "DeepSpeed unknown is installed, expected 0.19"


def test_another_release_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, "0.18.4", "raise AssertionError('imported')", monkeypatch)
    assert library.why_not_usable.__wrapped__() == "DeepSpeed 0.18.4 is installed, expected 0.19"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('first\\nsecond')", "ImportError: first"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os\nos._exit(7)", "it ended with exit code 7"),
        (
            "import atexit, sys\natexit.register(print, 'goodbye', file=sys.stderr)\nraise OSError('no libcuda')",
            "OSError: no libcuda",
        ),
    ],
)
def test_a_broken_one_says_what_broke_it_whatever_else_it_says(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, "0.19.8", source, monkeypatch)
    told = library.why_not_usable.__wrapped__()
    assert told is not None
    assert told.partition(": ")[2] == reason


def test_a_broken_one_keeps_its_noise_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_of_a_compilers_output_the_error_is_told_and_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = "Error building extension: [1/3] c++\\nFAILED: shm.o\\n/bin/sh: c++: not found\\nninja: build stopped"
    asked = tmp_path / "asked"
    source = f"open({str(asked)!r}, 'a').write('x')\nraise RuntimeError('{output}')"
    pretend(tmp_path, "0.19.8", source, monkeypatch)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^DeepSpeed cannot compile \w+: /bin/sh: c\+\+: not found$"):
            library.compile_for_ranks()
    assert asked.read_text() == "x"
