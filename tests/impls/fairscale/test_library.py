"""Whether FairScale can be used, asked of directories that hold it in every state. Needs no FairScale."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import implementation
from impls.fairscale.parts import library

NAMES = ("fairscale.oss", "fairscale.sharded_ddp", "fairscale.fsdp", "fairscale.pipe", "fairscale.tensor")


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FairScale as if it were not installed."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not any(Path(entry).glob("fairscale*"))])
    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in imported():
        del sys.modules[name]


def imported() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "fairscale"]


def install(directory: Path, version: str, source: str) -> None:
    for name in ("", *library.MODULES):
        path = directory.joinpath("fairscale", *name.split("."))
        path.mkdir(parents=True)
        (path / "__init__.py").write_text("" if name else source)
    information = directory / f"fairscale-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fairscale\nVersion: {version}\n")


@pytest.mark.parametrize("name", NAMES)
def test_its_implementations_are_found_without_it(name: str) -> None:
    assert implementation.load(name).libraries == ("fairscale",)


@pytest.mark.usefixtures("hidden")
def test_says_that_it_is_missing() -> None:
    assert library.why_unavailable.__wrapped__() == "fairscale is not installed: pip install fairscale==0.4.13"


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize(
    ("version", "source", "reason"),
    [
        ("0.4.6", "", "fairscale 0.4.13 is expected, 0.4.6 is installed"),
        (
            "0.4.13",
            "print('welcome')\nraise AttributeError('no _six in torch\\nand more')",
            "fairscale 0.4.13 cannot be imported: AttributeError: no _six in torch",
        ),
        ("0.4.13", "raise SystemExit('no GPU')", "fairscale 0.4.13 cannot be imported: SystemExit: no GPU"),
    ],
)
def test_says_in_one_line_what_is_wrong_with_it(
    version: str,
    source: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(tmp_path, version, source)
    monkeypatch.syspath_prepend(tmp_path)
    assert library.why_unavailable.__wrapped__() == reason
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("hidden")
def test_it_is_imported_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "0.4.13", "import warnings\nprint('welcome')\nwarnings.warn('deprecated')")
    monkeypatch.syspath_prepend(tmp_path)
    assert library.why_unavailable.__wrapped__() is None
    assert {f"fairscale.{name}" for name in library.MODULES} <= set(imported())
    assert capsys.readouterr() == ("", "")
