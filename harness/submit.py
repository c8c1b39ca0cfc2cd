"""A suite as a batch job: the sbatch script, and a job followed until its records are there.

The job runs `meshmark run SUITE --engine srun` on its first node; that starts torchrun's agents, one a node, for each
launch of each case. Results lie in a directory that all nodes see; compute nodes need no way to MLflow.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.case import Suite
from harness.result import RESULTS_FILE, Result, read

SCRIPT_FILE = "job.sh"
OUTPUT_FILE = "job.out"
_LAUNCHES_OF_A_CASE = 2
_BESIDE_CASES_SECONDS = 300  # references, and the job's own start
_GRACE_SECONDS = 120.0  # that Slurm itself takes to end a job at its limit
_POLL_SECONDS = 2.0
_NODES_DOWN_SECONDS = 1800.0  # that a job may wait for nodes that are down, if nobody says otherwise
_SILENCE_SECONDS = 300.0  # without an answer about a job, after which it is given up
_COMMAND_SECONDS = 60.0
_ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("TIMEOUT", "GONE"),
    }
)
_NEVER = frozenset(
    {
        "AccountNotAllowed",
        "BadConstraints",
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
    }
)
"""Reasons to wait that no time removes; a cluster that does not enforce its limits takes such a job in."""
_DOWN = ("Nodes_required_for_job_are_DOWN", "ReqNodeNotAvail")
"""How reasons to wait begin where nodes are down, drained or reserved."""
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked of Slurm. `command` goes on where Python's own begins: `run peers --engine srun ...`."""

    name: str
    num_nodes: int
    ranks_per_node: int
    command: Sequence[str]
    directory: Path  # of the results, seen by all nodes
    limit_seconds: float
    partition: str | None = None
    account: str | None = None
    extra: Sequence[str] = field(default_factory=tuple)  # more of sbatch's own options
    wait_seconds: float | None = None  # for the start; None: for long if it is its turn that is to come

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name.replace('_', '-').replace('num-', '')} must be at least 1, got {getattr(self, name)}"
                )
        if self.limit_seconds <= 0:  # Slurm takes 0 for no limit at all
            raise ValueError(f"--minutes must be at least 1, got {self.limit_seconds / 60:g}")
        if self.wait_seconds is not None and self.wait_seconds <= 0:
            raise ValueError(f"--wait-minutes must be at least 1, got {self.wait_seconds / 60:g}")
        for option in self.extra:
            if not option.startswith("-") or len(option.splitlines()) != 1:
                raise ValueError(f"--sbatch: expected an option such as --gres=gpu:8, got {option!r}")


@dataclass(frozen=True, kw_only=True)
class State:
    """Of a job. `exit_code` is its script's, once it has ended."""

    name: str
    reason: str = ""
    exit_code: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.name in _ENDED

    @property
    def is_waiting(self) -> bool:
        return self.name in _WAITING


def limit_seconds(suite: Suite) -> float:
    """The longest that the suite may take by the deadlines of its cases, each for two launches."""
    return sum(_LAUNCHES_OF_A_CASE * case.deadline_seconds for case in suite.cases) + _BESIDE_CASES_SECONDS


def script(job: Job, *, python: str = sys.executable, checkout: Path | None = None, where: Path | None = None) -> str:
    """The text for sbatch: one task a node, which is torchrun's agent; all of the node's processors are its. The suite
    and what it names are found from `where`, by default here, as `meshmark run` finds them."""
    checkout = checkout or Path(__file__).resolve().parent.parent
    options = {
        "job-name": job.name,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        "exclusive": None,
        "time": str(-(-round(job.limit_seconds) // 60)),  # minutes
        "output": str(job.directory / OUTPUT_FILE).replace("%", "%%"),  # %j would be the job's number
        "partition": job.partition,
        "account": job.account,
    }
    lines = ["#!/bin/bash"]
    lines += [
        f"#SBATCH --{name}" + ("" if value is None else f"={shlex.quote(value)}")
        for name, value in options.items()
        if value is not None or name == "exclusive"
    ]
    lines += [f"#SBATCH {option}" for option in job.extra]
    lines += [
        "set -euo pipefail",
        f"cd {shlex.quote(str(where or Path.cwd()))}",
        f'export PYTHONPATH={shlex.quote(str(checkout))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        f"exec {shlex.join([python, '-m', 'harness', *job.command])}",
    ]
    return "\n".join(lines) + "\n"


def submit(job: Job) -> str:
    """Hands the script to sbatch; the job's number. OSError or ValueError with what sbatch says."""
    path = job.directory / SCRIPT_FILE
    path.write_text(script(job), encoding="utf-8")
    said = _run(["sbatch", "--parsable", str(path)])
    return said.strip().partition(";")[0]


def state(number: str) -> State:
    """By scontrol; by sacct where Slurm has forgotten the job already, and `GONE` where that knows nothing of it."""
    try:
        told = _run(["scontrol", "-o", "show", "job", number])
    except ValueError as error:
        if "Invalid job id" not in str(error):
            raise
        return _accounted(number)
    fields = dict(re.findall(r"(\w+)=(\S*)", told))
    return State(
        name=fields["JobState"], reason=fields.get("Reason", ""), exit_code=_exit_code(fields.get("ExitCode", ""))
    )


def follow(job: Job, number: str, on_state: Callable[[State], None], on_result: Callable[[Result], None]) -> State:
    """Until the job has ended: its states as they change and its results as they come. One that has not ended by its
    limit and a little more is cancelled, whatever Slurm believes of it: its nodes may never have come up. So is one
    that has not started within `wait_seconds`, by default half an hour where Slurm says that its nodes are down."""
    seen: set[tuple[str, float]] = set()
    list(_new_results(job.directory, seen))  # of the run that this one resumes
    last: State | None = None
    started: float | None = None
    waits = _Waits(job.wait_seconds)
    heard = time.monotonic()
    while True:
        try:
            now, heard = state(number), time.monotonic()
        except (OSError, ValueError) as error:  # a controller that is restarted is silent, and the job goes on
            if time.monotonic() - heard > _SILENCE_SECONDS:
                return State(name="GONE", reason=str(error))
            time.sleep(_POLL_SECONDS)
            continue
        if last is None or (now.name, now.reason) != (last.name, last.reason):
            on_state(now)
        last = now
        for result in _new_results(job.directory, seen):
            on_result(result)
        if now.has_ended:
            return now
        if now.is_waiting and now.reason in _NEVER:
            return State(name="CANCELLED", reason=f"{now.reason}: it can never start{_cancelled(number)}")
        if (late := waits.too_long(now)) is not None:
            return State(name="DEADLINE", reason=late + _cancelled(number))
        if started is None and not now.is_waiting:
            started = time.monotonic()
        if started is not None and time.monotonic() - started > job.limit_seconds + _GRACE_SECONDS:
            late = f"{now.name} for more than its limit of {job.limit_seconds:.0f} s"
            return State(name="DEADLINE", reason=late + _cancelled(number))
        time.sleep(_POLL_SECONDS)


class _Waits:
    """How long a job has waited for its start, and for nodes that are down; a job that is requeued waits anew."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._since: float | None = None
        self._down_since: float | None = None

    def too_long(self, now: State) -> str | None:
        """What is said of a job that has waited for longer than it may, or None."""
        clock = time.monotonic()
        self._since = (self._since or clock) if now.is_waiting else None
        self._down_since = (self._down_since or clock) if now.is_waiting and now.reason.startswith(_DOWN) else None
        since, limit = (self._since, self._limit) if self._limit else (self._down_since, _NODES_DOWN_SECONDS)
        if since is None or clock - since <= limit:
            return None
        return f"{now.name} for more than {limit:.0f} s, {now.reason}; --wait-minutes is how long it may wait"


def cancel(number: str) -> None:
    """Ends the job. OSError or ValueError with what scancel says."""
    _run(["scancel", number])


def _cancelled(number: str) -> str:
    """Ends the job; nothing to add, or why that failed."""
    try:
        cancel(number)
    except (OSError, ValueError) as error:
        return f"; it could not be cancelled: {error}"
    return ""


def _new_results(directory: Path, seen: set[tuple[str, float]]) -> Iterator[Result]:
    """Those not `seen` yet, by case and start."""
    if not (directory / RESULTS_FILE).is_file():
        return
    for result in read(directory):
        if (result.case.id, result.started) not in seen:
            seen.add((result.case.id, result.started))
            yield result


def _accounted(number: str) -> State:
    try:
        told = _run(
            ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", "--jobs", number]
        )
    except (OSError, ValueError):
        return State(name="GONE")
    name, _, code = told.partition("\n")[0].partition("|")
    return State(name=name.partition(" ")[0], exit_code=_exit_code(code)) if name else State(name="GONE")


def _exit_code(text: str) -> int | None:
    """`1:0` is exit code 1, `0:9` the end by a signal."""
    code, _, number = text.partition(":")
    return (int(code) or (128 + int(number) if int(number or 0) else 0)) if code.isdigit() else None


def _run(command: list[str]) -> str:
    """What the command prints. OSError where there is no such command, ValueError where it fails, with its words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except FileNotFoundError as error:
        raise OSError(f"{command[0]}: expected Slurm's commands on this machine, found none") from error
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{command[0]} gave no answer within {_COMMAND_SECONDS:g} s") from error
    if done.returncode:
        raise ValueError(f"{command[0]}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout
