"""Commands of the regression gate: check, accept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.commands.arguments import (
    AcceptedOption,
    JudgedResultsOption,
    JudgedSuiteOption,
    SuiteRunOption,
    bad_input,
    warning_line,
)
from harness.one_line import one_line

if TYPE_CHECKING:
    from harness.paired.paired_report import PairedRun
    from harness.regression.check import Check


def check(
    *,
    suite: JudgedSuiteOption = None,
    suite_run: SuiteRunOption = None,
    results: JudgedResultsOption = None,
    format: Annotated[
        Literal["table", "markdown", "json"], typer.Option("--format", help="How to print the verdicts.")
    ] = "table",
    accepted: AcceptedOption = None,
    no_upload: Annotated[bool, typer.Option("--no-upload", help="Leave the verdicts out of MLflow.")] = False,
    confirm: Annotated[
        bool | None,
        typer.Option(
            "--confirm/--no-confirm",
            help="Time what is regressed or suspect in turns, on the last commit before and on tonight's, and let that "
            "decide; some minutes a case. By default five, regressed first, then slowest, where both commits are in "
            "the repository here and this is the history's machine; --confirm: all of them, on another machine, too.",
            show_default=False,
        ),
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Simulate nights instead: how often the gate errs, how soon it finds."),
    ] = False,
) -> None:
    """Judge the latest suite run by its machine's history and the accepted values; exit code 1 when it is red.

    [bold]meshmark check[/]                                           the latest suite run in MLflow

    [bold]meshmark check --suite nightly[/]                           the latest one of that suite

    [bold]meshmark check --results results/smoke-20300101-120000[/]   that run, whether it was uploaded or not

    [bold]meshmark check --no-confirm[/]                              by history alone, in seconds

    [bold]meshmark check --format markdown > comment.md[/]            for a comment under a change
    """
    from harness import suite_run as runs
    from harness.regression import check_report, gate

    if self_test:
        from harness.regression.self_test import self_test as simulate

        tested = simulate()
        print("\n".join(check_report.self_test_lines(tested)))
        raise typer.Exit(1 if tested.failures else 0)
    with bad_input():
        judged = gate.judged(suite=suite, suite_run=suite_run, results=results, accepted_directory=accepted)
    interrupt: KeyboardInterrupt | None = None
    if confirm is not False:
        judged, interrupt = _confirmed(judged, results, on_request=confirm is True, upload=not no_upload)
    if format == "json":
        print(json.dumps(check_report.to_json(judged), indent=1, allow_nan=False))
    elif format == "markdown":
        print(check_report.markdown(judged), end="")
    else:
        runs.console_here().print(check_report.text(judged))
    if not no_upload:
        with warning_line():
            gate.record_verdicts(judged)
    raise typer.Exit(runs.exit_code_of(interrupt) if interrupt else 1 if judged.is_red else 0)


def _confirmed(
    judged: Check, results: Path | None, *, on_request: bool, upload: bool
) -> tuple[Check, KeyboardInterrupt | None]:
    """The check with what two commits in turns say. Whatever ends that early, the verdicts of the history stay."""
    import subprocess

    from harness import suite_run as runs
    from harness.paired import paired_report, paired_run
    from harness.regression import confirmation, gate

    def keep(compared: PairedRun) -> Path:
        directory = paired_run.directory_named(f"{compared.suite}-{compared.a.commit[:8]}")
        kept = paired_report.write(compared, directory)
        if upload:
            print(paired_run.record(compared, kept), file=sys.stderr)
        return kept

    try:
        with runs.termination_interrupts(), paired_run.telling() as tell:
            cases = gate.cases_at_hand(judged, results)
            machine_of = None if on_request else confirmation.this_machine()
            return confirmation.confirm(judged, cases, Path.cwd(), machine_of=machine_of, tell=tell, keep=keep), None
    except confirmation.Interrupted as interrupted:
        return interrupted.checked, interrupted.interrupt
    except KeyboardInterrupt as interrupt:
        return confirmation.with_note(judged, confirmation.INTERRUPTED), interrupt
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        return confirmation.with_note(judged, f"nothing timed in turns: {one_line(error)}"), None


def accept(
    *,
    suite: JudgedSuiteOption = None,
    suite_run: SuiteRunOption = None,
    results: JudgedResultsOption = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The cases whose implementation, options or layout contain this."),
    ] = None,
    accepted: AcceptedOption = None,
    no_upload: Annotated[bool, typer.Option("--no-upload", help="Leave MLflow alone.")] = False,
) -> None:
    """Take what a suite run shows as what is right from now on: exact figures, times that have moved, and what is gone.

    [bold]meshmark accept --suite nightly[/]               the latest run of it, into accepted/nightly.txt

    [bold]meshmark accept --only 'native.zero stage=2'[/]  those cases of the latest run of any suite
    """
    from datetime import UTC, datetime

    from harness.regression import gate

    with bad_input():
        judged = gate.judged(suite=suite, suite_run=suite_run, results=results, accepted_directory=accepted)
        cases = [case for case in judged.cases if only is None or only in case.run.name]
        if not cases:
            raise ValueError(f"--only {only}: expected part of one of {len(judged.cases)} cases' names, found none")
        lines = gate.accept_cases(judged, cases, accepted)
    print("\n".join(lines) if lines else "nothing to accept: all is as accepted, nothing has moved or is gone")
    if lines and not no_upload:
        with warning_line():
            gate.record_acceptance(judged, cases, datetime.now(UTC))
