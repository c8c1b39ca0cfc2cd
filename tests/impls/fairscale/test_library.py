"""Whether FairScale can be used, asked of directories that hold it in every state. Needs no FairScale."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import implementation
from harness.case import Case, Measurement, Suite
from harness.layout import Layout
from harness.progress import SilentProgress
from harness.runner import run
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


def pretend(directory: Path, version: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs it where this process and those that it starts find it."""
    for name in ("", *library.MODULES):
        path = directory.joinpath("fairscale", *name.split("."))
        path.mkdir(parents=True)
        (path / "__init__.py").write_text("" if name else source)
    information = directory / f"fairscale-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fairscale\nVersion: {version}\n")
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))  # nobody shall remember it


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
        ("0.4.13", "import os\nos.abort()", "fairscale 0.4.13 cannot be imported: it was ended by SIGABRT"),
        ("0.4.13", "import warnings\nprint('welcome')\nwarnings.warn('deprecated')", None),
    ],
)
def test_says_in_one_line_what_is_wrong_with_it(
    version: str,
    source: str,
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pretend(tmp_path, version, source, monkeypatch)
    assert library.why_unavailable.__wrapped__() == reason
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("hidden")
def test_cases_of_one_that_aborts_say_so_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once, however many cases there are."""
    asked = tmp_path / "asked"
    pretend(tmp_path, "0.4.13", f"import os\nopen({str(asked)!r}, 'a').write('x')\nos.abort()", monkeypatch)
    library.why_unavailable.cache_clear()
    measurement = Measurement(parity_steps=0, warm_up_steps=0, timed_steps=1, communication_steps=0, memory_steps=0)
    cases = [
        Case(workload="awkward:kind=sgd", implementation=name, layout=Layout(data=ranks), measurement=measurement)
        for name, ranks in (("fairscale.oss", 2), ("fairscale.sharded_ddp", 2), ("reference", 1))
    ]
    suite = Suite(name="aborting", description="", cases=tuple(cases))
    try:
        results = run(suite, tmp_path / "results", progress=SilentProgress())
    finally:
        library.why_unavailable.cache_clear()
    assert [result.status for result in results] == ["unavailable", "unavailable", "ok"]
    assert {result.reason for result in results[:2]} == {"fairscale 0.4.13 cannot be imported: it was ended by SIGABRT"}
    assert asked.read_text() == "x"
