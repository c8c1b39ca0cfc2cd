"""The runner: takes a suite through its cases, whatever becomes of each, and writes a result for every one."""

from __future__ import annotations

import errno
import fcntl
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from harness import ratios, result, scratch, suite_file
from harness.case import Case, Suite
from harness.engines import Engine, Local
from harness.judging import judge
from harness.launch.failure import LaunchFailed
from harness.measured_case import MeasuredCase, is_available
from harness.progress import Progress
from harness.references import References
from harness.report import RATIOS_FILE
from harness.result import Result
from harness.room import Room

_LOCK_FILE = ".lock"
_WORTH_RUNNING_AGAIN = frozenset(
    {"failed", "timed out", "out of memory", "topology mismatch", "bytes mismatch", "unavailable"}
)


class DirectoryInUse(ValueError):
    """Another run is writing its results here."""


class NotWritten(Exception):
    """A result could not be written; what was written before it stays. The message says where the result is instead."""


def run(
    suite: Suite,
    directory: Path,
    *,
    progress: Progress,
    resume: bool = False,
    device: str = "cpu",
    engine: Engine | None = None,
    canary: Callable[[], Mapping[str, float]] | None = None,
    command: str | None = None,
) -> list[Result]:
    """Runs every case of `suite` and appends each result to the directory's results file as soon as it is known; with
    `resume` only those that have none yet or could not be measured. All results of the directory, in suite order.

    `canary` measures the machine before the first case, where any case is to be timed; each result's environment then
    holds its figures. `command` is what was typed, kept beside the results. A KeyboardInterrupt ends all ranks and is
    raised again; the results so far are kept. DirectoryInUse if another run is writing to the directory; NotWritten if
    a result cannot be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _as_only_run(directory):
        return _run(
            suite,
            directory,
            progress,
            resume=resume,
            device=device,
            engine=engine or Local(),
            canary=canary,
            command=command,
        )


def _run(
    suite: Suite,
    directory: Path,
    progress: Progress,
    *,
    resume: bool,
    device: str,
    engine: Engine,
    canary: Callable[[], Mapping[str, float]] | None,
    command: str | None,
) -> list[Result]:
    earlier = {r.case.id: r for r in result.read(directory)} if (directory / result.RESULTS_FILE).is_file() else {}
    if earlier and not resume:
        raise ValueError(f"{directory}: holds results already; expected an empty directory, or --resume")
    suite_run = suite_file.begin(suite.name, directory, resume=resume, command=command)
    groups = [group for group in _groups(suite) if _has_to_run(group, earlier, engine)]
    due = [case for group in groups for case in group]
    progress.suite_started(suite, due)
    num_suite_cases = len(suite.cases) + suite.num_left_out
    is_timed = any(case.measurement.timed_steps for case in due)
    canary_figures = _canary_figures(canary, progress) if canary is not None and is_timed else {}
    shared = directory.resolve() if engine.shares_files else None
    with scratch.directory(shared) as temporary:
        references = References(temporary, directory / "logs")
        try:
            for group in groups:
                members = [
                    MeasuredCase(
                        case=case,
                        scratch=temporary,
                        logs=result.logs_of(directory, case),
                        references=references,
                        on_start=partial(progress.case_started, case),
                        on_phase=partial(progress.phase, case),
                        beside=[other for other in suite.cases if other.side_by_side == case.side_by_side],
                        device=device,
                        engine=engine,
                        canary=canary_figures,
                    )
                    for case in group
                ]
                with closing(_run_group(members)) as finished:
                    for measured in finished:
                        earlier[measured.case.id] = measured.result(suite.name, suite_run, num_suite_cases)
                        _write(directory, earlier[measured.case.id])
                        progress.case_finished(earlier[measured.case.id])
        finally:
            references.close()
    results = [earlier[case.id] for case in suite.cases if case.id in earlier]
    if suite.interleaved:
        rows = ratios.ratio_rows(results)
        (directory / RATIOS_FILE).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    progress.suite_finished(results)
    return results


def _write(directory: Path, finished: Result) -> None:
    """Appends the result; where that cannot be done, it is kept among the system's temporary files, and NotWritten says
    where."""
    try:
        result.append(directory, finished)
    except OSError as error:
        try:
            elsewhere = Path(tempfile.mkdtemp(prefix=f"unwritten-{finished.suite_run}-"))
            result.append(elsewhere, finished)
        except OSError:
            raise NotWritten(f"{error.strerror}: {error.filename}; the last result is lost") from error
        kept = elsewhere / result.RESULTS_FILE
        raise NotWritten(f"{error.strerror}: {error.filename}; the last result is in {kept}") from error


@contextmanager
def _as_only_run(directory: Path) -> Iterator[None]:
    """Holds the directory's lock, which the system takes back when this process ends, however it does: a lock file that
    is left over says nothing."""
    with (directory / _LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUse(f"{directory}: another run is writing here") from None
        except OSError as error:
            # Some network file systems have no locks; a run there is better than none.
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
        yield


def _groups(suite: Suite) -> list[list[Case]]:
    """Cases that are timed side by side; one by one where the suite is not interleaved."""
    if not suite.interleaved:
        return [[case] for case in suite.cases]
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in suite.cases:
        groups.setdefault(case.side_by_side, []).append(case)
    return list(groups.values())


def _is_due(case: Case, earlier: dict[str, Result]) -> bool:
    return case.id not in earlier or earlier[case.id].status in _WORTH_RUNNING_AGAIN


def _has_to_run(group: Sequence[Case], earlier: dict[str, Result], engine: Engine) -> bool:
    """Not where all that is missing is what cannot run here still: the others would all take their turns again."""
    due = [case for case in group if _is_due(case, earlier)]
    if len(due) == len(group) or any(
        case.id not in earlier or earlier[case.id].status != "unavailable" for case in due
    ):
        return bool(due)
    return any(is_available(case, engine) for case in due)


def _canary_figures(canary: Callable[[], Mapping[str, float]], progress: Progress) -> Mapping[str, float]:
    """None where the canary fails: the cases may fare better, and times without it are only not judged by history."""
    try:
        return canary()
    except LaunchFailed as failure:
        progress.note(f"no canary: {failure.reason}")
        return {}


def _run_group(members: Sequence[MeasuredCase]) -> Generator[MeasuredCase, None, None]:
    """Measures the cases of a group; yields each when all that can be known of it is.

    Timed windows take turns, and every round begins with another case: what drifts meets each of them alike.
    """
    running: list[MeasuredCase] = []
    room = Room()
    try:
        for member in members:
            member.on_start()
            sound = _guarded(member, member.probe) and member.status == "ok"
            if sound and _guarded(member, room.check) and _guarded(member, member.start):
                running.append(member)
                room.taken()
        for number in range(max((member.case.measurement.rounds for member in running), default=0)):
            for offset in range(len(running)):
                member = running[(number + offset) % len(running)]
                measurement = member.case.measurement
                if member.failure is None and measurement.timed_steps and number < measurement.rounds:
                    _guarded(member, partial(member.time_one_round, number))
        for member in running:
            if member.failure is None:
                _guarded(member, member.finish_timing)
        for member in members:
            if member in running and member.failure is None and _guarded(member, member.instrument):
                _guarded(member, partial(judge, member))
            yield member
    finally:
        for member in members:
            member.abandon()


def _guarded(member: MeasuredCase, step: Callable[[], None]) -> bool:
    """Carries out one step of a case; False if the case has failed in it, whichever way: the suite goes on."""
    with _counting_time(member):
        try:
            step()
        except LaunchFailed as failure:
            member.fail(failure)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            member.fail(LaunchFailed("failed", reason, traceback=traceback.format_exc()))
    return member.failure is None


@contextmanager
def _counting_time(member: MeasuredCase) -> Iterator[None]:
    before = time.monotonic()
    try:
        yield
    finally:
        member.seconds += time.monotonic() - before
