"""A Python program in a process of its own: what may abort, segfault, hang or print must not do so here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_TOLD = "meshmark: what went wrong: "  # nobody else begins a line so
_TELLING = """
try:
{program}
except BaseException as error:
    import json
    print("\\n{told}" + json.dumps(f"{{type(error).__name__}}: {{error}}"), flush=True)
    raise
"""
_AFTER_KILL_SECONDS = 10.0


def first_error(program: str, *, timeout_seconds: float, environment: Mapping[str, str] | None = None) -> str | None:
    """What is wrong with a Python program, in one line, or None; `environment` is set beside what there is. It tells
    that itself: what is last on its standard error may be anybody's. Whatever processes it has started end with it
    where it takes too long."""
    with subprocess.Popen(
        [sys.executable, "-c", _TELLING.format(program=textwrap.indent(program, "    "), told=_TOLD)],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,  # a compiler's processes are in its group
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=_AFTER_KILL_SECONDS)
            if isinstance(error, subprocess.TimeoutExpired):
                return f"it took more than {timeout_seconds:g} seconds"
            raise
    told = [line.removeprefix(_TOLD) for line in output.splitlines() if line.startswith(_TOLD)]
    if told:
        return _one_line(json.loads(told[-1]))
    return _ending(process.returncode)


def remembered_error(
    program: str,
    *,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
    remembers_errors: bool = False,
) -> str | None:
    """As `first_error`, of a program that asks what follows from Python's packages alone: that nothing is wrong is kept
    in the user's cache until one is installed, updated or removed. So is what is wrong where it `remembers_errors`;
    else a compiler that comes to be there, say, is noticed."""
    asked = [sys.executable, program, *sorted((environment or {}).items()), *_packages()]
    answer = _cache() / f"{hashlib.sha256(repr(asked).encode()).hexdigest()}.json"
    with suppress(OSError, ValueError):
        kept: str | None = json.loads(answer.read_text())
        return kept
    error = first_error(program, timeout_seconds=timeout_seconds, environment=environment)
    if error is None or remembers_errors:
        with suppress(OSError):  # a home that cannot be written to
            answer.parent.mkdir(parents=True, exist_ok=True)
            unfinished = answer.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(error))
            unfinished.replace(answer)
    return error


def _packages() -> Iterator[tuple[str, int]]:
    """What pip leaves of each package that can be imported, and since when it is there."""
    for directory in map(Path, sys.path):
        if directory.is_dir():
            for entry in sorted(directory.glob("*.dist-info")):
                with suppress(OSError):  # on its way
                    yield str(entry), entry.stat().st_mtime_ns


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshmark" / "programs"


def _ending(code: int) -> str | None:
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}" if code else None


def _one_line(message: str) -> str:
    """The first line; of a compiler's output, which begins with its command, the first that tells an error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return next((line for line in lines[1:] if re.search(r"error: |not found", line)), lines[0])
