"""Temporary directories: gone with their makers, at the latest when the next one is made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import scratch

ROOT = Path(__file__).resolve().parents[2]
_HOLDER = """
import sys, time
from pathlib import Path
from harness import scratch
with scratch.directory(Path(sys.argv[1])) as made:
    (made / "weights.pt").write_text("x")
    print(made, flush=True)
    time.sleep(60)
"""


def test_a_directory_is_gone_afterwards(tmp_path: Path) -> None:
    with scratch.directory(tmp_path) as first, scratch.directory(tmp_path) as second:
        assert first != second
        assert first.is_dir()
        (first / "a").mkdir()
        (first / "a" / "file").write_text("x")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_has_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    foreign = tmp_path / "meshmark-somebody-elses"
    foreign.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert holder.stdout is not None
    left = Path(holder.stdout.readline().strip())
    with scratch.directory(tmp_path):
        assert left.is_dir(), "its maker lives"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert left.is_dir()
    with scratch.directory(tmp_path):
        assert not left.exists()
    assert list(tmp_path.iterdir()) == [foreign]


_SOCKETS = """
import multiprocessing.connection as connection, tempfile
from pathlib import Path
from harness import scratch
scratch.place_sockets()
scratch.place_sockets()
with connection.Listener() as listener:
    print(listener.address)
"""


@pytest.mark.parametrize("length", [10, 90])
def test_sockets_have_short_names_whatever_the_temporary_path(length: int, tmp_path: Path) -> None:
    temporary = tmp_path / ("t" * length)
    temporary.mkdir()
    told = subprocess.run(
        [sys.executable, "-c", _SOCKETS],
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    address = Path(told.stdout.strip())
    assert len(str(address)) <= 107
    assert not address.parent.exists(), "gone with the process"
    assert not list(temporary.iterdir())


def test_no_place_for_sockets_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_SHORT", tmp_path / "none")
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path / ("t" * 100)))
    settings = scratch.process.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setitem(settings, "tempdir", None)
    monkeypatch.delitem(settings, "tempdir")
    with pytest.raises(OSError, match=r"^TMPDIR: expected a path of at most \d+ bytes, or .*none to be writable, got"):
        scratch.place_sockets()
