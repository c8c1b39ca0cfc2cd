"""Programs in processes of their own, and what is told of those that end badly."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness.own_process import first_error, remembered_error


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('error: no')\nimport warnings\nwarnings.warn('welcome')", None),
        ("import os\nos.abort()", "it was ended by SIGABRT"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "it was ended by SIGSEGV"),
        ("import os\nos._exit(7)", "it ended with exit code 7"),
        ("raise SystemExit('no GPU')", "SystemExit: no GPU"),
        ("raise AttributeError('no _six in torch\\nand more')", "AttributeError: no _six in torch"),
        ("raise RuntimeError('[1/3] c++\\na.cpp:1: error: what\\nninja: stopped')", "a.cpp:1: error: what"),
    ],
)
def test_the_first_line_of_what_went_wrong(program: str, reason: str | None) -> None:
    assert first_error(program, timeout_seconds=60) == reason


def test_what_takes_too_long_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    """As a build is, whose compilers are processes of ninja's."""
    file = tmp_path / "grandchild"
    program = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sh', '-c', 'sleep 600 & echo $! > \"$0.new\"; mv \"$0.new\" \"$0\"; wait', "
        f"{str(file)!r}])\n"
        "time.sleep(600)\n"
    )
    assert first_error(program, timeout_seconds=3) == "it took more than 3 seconds"
    grandchild = int(file.read_text())
    deadline = time.monotonic() + 10
    while _runs(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(grandchild)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip leaves of one that can be imported here, beside an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    information = tmp_path / "packages" / "some-1.0.dist-info"
    information.mkdir(parents=True)
    monkeypatch.syspath_prepend(information.parent)
    return information


def counting(tmp_path: Path, then: str) -> str:
    return f"open({str(tmp_path / 'asked')!r}, 'a').write('x')\n{then}"


@pytest.mark.parametrize(
    ("then", "remembers_errors", "answer", "times"),
    [
        ("pass", False, None, 1),
        ("raise OSError('no compiler')", False, "OSError: no compiler", 3),
        ("raise KeyError('all_gather')", True, "KeyError: 'all_gather'", 1),
    ],
)
def test_what_follows_from_packages_is_asked_once(
    package: Path, tmp_path: Path, then: str, remembers_errors: bool, answer: str | None, times: int
) -> None:
    for _ in range(3):
        found = remembered_error(
            counting(tmp_path, then), timeout_seconds=60, environment={"A": "b"}, remembers_errors=remembers_errors
        )
        assert found == answer
    assert (tmp_path / "asked").read_text() == "x" * times


def test_it_is_asked_again_when_a_package_or_the_environment_has_changed(package: Path, tmp_path: Path) -> None:
    def ask(**environment: str) -> int:
        remembered_error(counting(tmp_path, "pass"), timeout_seconds=60, environment=environment)
        return len((tmp_path / "asked").read_text())

    assert [ask(), ask()] == [1, 1]
    os.utime(package, (0, 0))
    assert [ask(), ask()] == [2, 2]
    package.with_name("other-2.0.dist-info").mkdir()
    assert [ask(), ask()] == [3, 3]
    assert [ask(A="b"), ask(A="b")] == [4, 4]


def test_a_cache_that_cannot_be_written_costs_the_question_again(package: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no directory")
    for _ in range(2):
        assert remembered_error(counting(tmp_path, "pass"), timeout_seconds=60) is None
    assert (tmp_path / "asked").read_text() == "xx"
