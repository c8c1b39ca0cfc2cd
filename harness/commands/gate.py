"""Commands of the regression gate: check, accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.commands.arguments import AcceptedOption, JudgedResultsOption, SuiteRunOption, bad_input, warning_line


def check(
    *,
    suite_run: SuiteRunOption = None,
    results: JudgedResultsOption = None,
    format: Annotated[
        Literal["table", "markdown", "json"], typer.Option("--format", help="How to print the verdicts.")
    ] = "table",
    accepted: AcceptedOption = Path("accepted"),
    no_upload: Annotated[bool, typer.Option("--no-upload", help="Leave the verdicts out of MLflow.")] = False,
    confirm: Annotated[
        bool | None,
        typer.Option(
            "--confirm/--no-confirm",
            help="Time what is regressed or suspect in turns, on the last commit before and on tonight's, and let that "
            "decide; some minutes a case. By default where both are in the repository here and this is the history's "
            "machine; --confirm: on another one, too.",
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
        judged = gate.judged(suite_run=suite_run, results=results, accepted_directory=accepted)
    if confirm is not False:
        from harness.paired import paired_run
        from harness.regression import confirmation

        with bad_input(), paired_run.telling() as tell:
            judged = confirmation.confirm(
                judged,
                gate.cases_at_hand(judged, results),
                Path.cwd(),
                machine_of=None if confirm else confirmation.this_machine(),
                tell=tell,
            )
    if format == "json":
        print(json.dumps(check_report.to_json(judged), indent=1, allow_nan=False))
    elif format == "markdown":
        print(check_report.markdown(judged), end="")
    else:
        runs.console_here().print(check_report.text(judged))
    if not no_upload:
        with warning_line():
            gate.record_verdicts(judged)
    raise typer.Exit(1 if judged.is_red else 0)


def accept(
    *,
    suite_run: SuiteRunOption = None,
    results: JudgedResultsOption = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The cases whose implementation, options or layout contain this."),
    ] = None,
    accepted: AcceptedOption = Path("accepted"),
    no_upload: Annotated[bool, typer.Option("--no-upload", help="Leave MLflow alone.")] = False,
) -> None:
    """Take what a suite run shows as what is right from now on: exact figures, and times that have moved.

    [bold]meshmark accept[/]                           the latest suite run, into accepted/SUITE.txt

    [bold]meshmark accept --only 'native.zero stage=2'[/]  those cases of it
    """
    from datetime import UTC, datetime

    from harness.regression import gate

    with bad_input():
        judged = gate.judged(suite_run=suite_run, results=results, accepted_directory=accepted)
        cases = [case for case in judged.cases if only is None or only in case.run.name]
        if not cases:
            raise ValueError(f"--only {only}: expected part of one of {len(judged.cases)} cases' names, found none")
        lines = gate.accept_cases(judged, cases, accepted)
    print("\n".join(lines) if lines else "nothing to accept: all is as accepted, and no time has moved")
    if lines and not no_upload:
        with warning_line():
            gate.record_acceptance(judged, cases, datetime.now(UTC))
