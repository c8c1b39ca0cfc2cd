"""One batch job as a person meets it: submitted, followed, reported, recorded in MLflow from here."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence

from harness import report, submit, suite_run
from harness.case import Suite
from harness.result import RESULTS_FILE, Result, read


def execute(suite: Suite, job: submit.Job, *, as_json: bool, upload: bool, again: Sequence[str]) -> int:
    """Submits the job and follows it; the exit code is that of `run` where it could run. `again` is the command that
    goes on with what is missing."""
    hint = f"; to go on: {shlex.join(again)}"
    said = sys.stderr if as_json else sys.stdout

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=said, flush=True)

    try:
        number = submit.submit(job)
    except (OSError, ValueError) as error:
        print(f"meshmark: {error}", file=sys.stderr)
        return suite_run.BAD_INPUT
    say(f"job {number}: {len(suite.cases)} cases on {job.num_nodes} nodes, results in {job.directory}")
    try:
        with suite_run.termination_interrupts():
            ended = submit.follow(
                job,
                number,
                lambda state: say(f"job {number}: {state.name}{_because(state)}"),
                lambda result: say(_line(result)),
            )
    except KeyboardInterrupt as interrupt:
        try:
            submit.cancel(number)
            end = "is cancelled"
        except (OSError, ValueError) as error:
            end = f"could not be cancelled ({error})"
        print(
            f"meshmark: interrupted, job {number} {end}; what is finished is in {job.directory}{hint}", file=sys.stderr
        )
        return suite_run.exit_code_of(interrupt)
    if not (job.directory / RESULTS_FILE).is_file():
        output = job.directory / submit.OUTPUT_FILE
        print(
            f"meshmark: job {number} ended as {ended.name}{_because(ended)} without a result; its output: {output}",
            file=sys.stderr,
        )
        return 1
    results = read(job.directory)
    code = suite_run.show_and_record(results, job.directory, as_json=as_json, upload=upload)
    if len(results) < len(suite.cases):
        print(
            f"meshmark: job {number} ended as {ended.name} with {len(results)} of {len(suite.cases)} cases{hint}",
            file=sys.stderr,
        )
        return 1
    return code


def _because(state: submit.State) -> str:
    return f" ({state.reason})" if state.reason not in ("", "None") else ""


def _line(result: Result) -> str:
    return f"{result.case.label} {result.case.layout}: {result.status}, {report.headline(result)}"
