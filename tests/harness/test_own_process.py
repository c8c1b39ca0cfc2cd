"""Programs in processes of their own, and what is told of those that end badly."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness.own_process import first_error


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
