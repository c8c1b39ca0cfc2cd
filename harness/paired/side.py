"""A side of a comparison: one build's session, asked for one timing after another."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from harness.case import Case
from harness.paired.builds import Build

_SESSION = Path(__file__).with_name("session.py")
_START_SECONDS = 120.0  # the imports of a cold machine, and the weights
_END_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One run of a case: `seconds` is its median step, `steps` are those of each rank; None where it has not ended
    well, and `reason` says why."""

    status: str
    reason: str = ""
    seconds: float | None = None
    steps: list[list[float]] | None = None


class Side:
    """A session that stands ready while the other side is timed. Use as a context manager: leaving it ends the session
    and its ranks. One that was lost is started anew by the next timing."""

    def __init__(self, build: Build, *, device: str = "cpu") -> None:
        self.build = build
        self._device = device
        build.scratch.mkdir(exist_ok=True)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._num_timings = 0

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def time(self, case: Case) -> Timing:
        """The case, once, in fresh ranks."""
        self._num_timings += 1
        request = {
            "case": case.to_json(),
            "directory": str(self.build.scratch / str(self._num_timings)),
            "device": self._device,
        }
        process = self._ready()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = self._answers.get(timeout=case.deadline_seconds + _START_SECONDS)
        except queue.Empty:
            self._end()
            limit = case.deadline_seconds + _START_SECONDS
            return Timing(status="timed out", reason=f"{self.build.name}: no answer within {limit:g} s")
        except BrokenPipeError:
            answer = ""
        if not answer:
            log = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            self._end()
            return Timing(status="failed", reason=f"{self.build.name}: its process ended: {''.join(log[-1:])}")
        data: dict[str, Any] = json.loads(answer)
        reason = f"{self.build.name}: {data['reason']}" if data["reason"] else ""
        return Timing(status=data["status"], reason=reason, seconds=data["seconds"], steps=data.get("steps"))

    @property
    def _log(self) -> Path:
        return self.build.scratch / "session.log"

    def _ready(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        with self._log.open("a") as log:
            # A session of its own: a Ctrl-C of the terminal comes here alone, and here it is passed on, once.
            self._process = subprocess.Popen(
                [str(self.build.python), "-P", str(_SESSION)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment(),
                start_new_session=True,
            )
        self._answers = queue.Queue()
        threading.Thread(target=_pass_on, args=(self._process.stdout, self._answers), daemon=True).start()
        return self._process

    def _environment(self) -> dict[str, str]:
        """That of this process, where the build's code and commands come first; then those of this Python, whose
        packages the build may use, and with them their commands (a compiler's ninja)."""
        code = [str(self.build.source), os.environ.get("PYTHONPATH", "")]
        commands = [str(python.parent) for python in (self.build.python, Path(sys.executable))]
        # Two versions of a library compile operators of the same names: in one directory each turn would build anew.
        is_this_one = self.build.python == Path(sys.executable)
        own_operators = {} if is_this_one else {"TORCH_EXTENSIONS_DIR": str(self.build.scratch / "operators")}
        return {
            **os.environ,
            **own_operators,
            "PYTHONPATH": os.pathsep.join(filter(None, code)),
            "PATH": os.pathsep.join([*commands, os.environ.get("PATH", os.defpath)]),
            "TMPDIR": str(self.build.scratch),
        }

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _pass_on(lines: IO[str], answers: queue.Queue[str]) -> None:
    """Until the session ends, which an empty line tells."""
    with lines:
        for line in lines:
            answers.put(line)
    answers.put("")
