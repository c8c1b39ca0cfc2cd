"""One run of a suite as a person meets it: its directory, its progress, its report, its way into MLflow."""

from __future__ import annotations

import errno
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from harness import progress, report
from harness.case import Suite
from harness.result import RESULTS_FILE, Result, read, replace_non_finite

if TYPE_CHECKING:
    from harness.engines import Engine

BAD_INPUT = 2
INTERRUPTED = 130
TERMINATED = 143
_DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_UPLOAD_SECONDS = 300.0  # after which a slow tracking server has what is missing sent later
_RESULTS = Path("results")


class _Terminated(KeyboardInterrupt):
    """SIGTERM, from a batch system or `timeout`: the run ends as by Ctrl-C."""


def directory_for(suite: str, given: Path | None, *, resume: bool) -> Path:
    """The directory to write to, made if need be. ValueError if it holds another run's results, OSError if it cannot be
    written to."""
    if resume and given is None:
        earlier = sorted(_RESULTS.glob(f"{suite}-[0-9]*"))
        if not earlier:
            raise ValueError(f"--resume: expected an earlier run in {_RESULTS}/{suite}-*, found none")
        given = earlier[-1]
    directory = given or directory_named(suite)
    if not resume and (directory / RESULTS_FILE).exists():
        raise ValueError(f"--results {directory}: holds the results of a run; add --resume, or name another directory")
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / ".writable"
    probe.touch()
    probe.unlink()
    return directory


def directory_named(suite: str) -> Path:
    """Where a run of the suite that begins now writes by itself."""
    return _RESULTS / f"{suite}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def execute(
    suite: Suite,
    directory: Path,
    *,
    resume: bool,
    as_json: bool,
    upload: bool,
    again: Sequence[str] | None,
    device: str = "cpu",
    engine: Engine | None = None,
    command: Sequence[str] | None = None,
) -> int:
    """Run `suite` into `directory`, show and record what came out; returns the command's exit code. `command` is what
    was asked for, whatever the directory, and `again` goes on with it, should it be interrupted."""
    from harness import canary, runner  # bring torch, which showing a report does not need

    console = console_here()
    hint = f"; to go on: {shlex.join(again)}" if again else ""
    try:
        with termination_interrupts(), progress.shown_on(console, silent=as_json) as shown:
            returned = runner.run(
                suite,
                directory,
                progress=shown,
                resume=resume,
                device=device,
                engine=engine,
                canary=partial(canary.measure, device),
                command=None if command is None else shlex.join(command),
            )
    except runner.DirectoryInUse as error:
        print(f"meshmark: {error}", file=sys.stderr)
        return BAD_INPUT
    except runner.NotWritten as error:
        print(f"meshmark: {error}; what was finished before is kept{hint}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in _DISK_TROUBLE:
            raise
        print(f"meshmark: {error.strerror}: {error.filename}; what is finished is kept{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"meshmark: interrupted, what is finished is in {directory}{hint}", file=sys.stderr)
        return exit_code_of(interrupt)
    # A resumed run of some cases shows those of the directory that it left alone, too.
    chosen = {result.case.id for result in returned}
    found = [*returned, *(result for result in read(directory) if result.case.id not in chosen)]
    show_and_record(found, directory, as_json=as_json, upload=upload)
    return 0 if report.is_success(returned) else 1


def show_and_record(found: Sequence[Result], directory: Path, *, as_json: bool, upload: bool) -> int:
    """The report, on the screen and beside the results, and MLflow; 0 where every result is a success, else 1."""
    console = console_here()
    try:
        report.write(directory, found)
    except OSError as error:
        print(f"meshmark: no report is written: {error.strerror}: {error.filename}", file=sys.stderr)
    if as_json:
        print_json(found)
    else:
        console.print(report.text(found, report.read_ratios(directory), directory, console.width))
    if upload:
        print(_upload(directory), file=sys.stderr if as_json else sys.stdout)
    return 0 if report.is_success(found) else 1


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """As a shell's, by the signal."""
    return TERMINATED if isinstance(interrupt, _Terminated) else INTERRUPTED


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """SIGTERM raises _Terminated, once: `timeout` sends it twice, and the second must not break off the cleaning up."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def console_here() -> Console:
    """Standard output. A log is not 80 columns wide just because nobody can say how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def print_json(results: Sequence[Result]) -> None:
    print(json.dumps([replace_non_finite(result.to_json()) for result in results], indent=1, allow_nan=False))


def _upload(directory: Path) -> str:
    """Record in MLflow; whatever goes wrong there costs a line, never the run."""
    try:
        from harness import tracking

        return tracking.upload(directory, within_seconds=_UPLOAD_SECONDS).message
    except Exception as error:
        message = " ".join(str(error).split())
        return f"not in MLflow: {type(error).__name__}: {message}; later: meshmark upload {directory}"
