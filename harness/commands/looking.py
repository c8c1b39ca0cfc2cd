"""Commands that show what there is and what was measured: list, inspect, report, upload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.commands.arguments import DirectoryArgument, bad_input, count


def list_all(
    what: Annotated[
        Literal["all", "suites", "implementations", "workloads", "refusals"],
        typer.Argument(
            metavar="[suites|implementations|workloads|refusals]",
            help="What to list; by default all but refusals, which are asked of every implementation.",
        ),
    ] = "all",
) -> None:
    """Show the suites, implementations and workloads there are, what cannot run here and why, and what is refused."""
    from harness import catalogue, suite_run

    console = suite_run.console_here()
    if what in ("all", "suites"):
        console.print(catalogue.suites_table())
    if what in ("all", "implementations"):
        console.print(catalogue.implementations_table())
    if what == "refusals":
        console.print(catalogue.refusals_table())
    if what in ("all", "workloads"):
        console.print(catalogue.workloads_table())
    if what in ("all", "implementations"):
        console.print(" which workloads an implementation refuses, and why: meshmark list refusals")


def inspect(
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD",
            help="From `meshmark list workloads`, with options, or file.py:builder.",
            show_default=False,
        ),
    ],
    *,
    pipeline: Annotated[int | None, count("Cut the blocks for so many ranks.")] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="S", help="A pipeline schedule, such as 1f1b; its timeline is drawn.")
    ] = None,
    chunks: Annotated[int | None, count("Stages on each rank, where the schedule takes several.")] = None,
    micro_batches: Annotated[int | None, count("Micro-batches a step; by default the workload's.")] = None,
    partition: Annotated[
        Literal["uniform", "parameters", "flops", "time", "memory"],
        typer.Option(help="What stages are to have alike; time measures the blocks here."),
    ] = "flops",
    precision: Annotated[str, typer.Option(help="fp32, fp64, bf16 or bf16_fp32_gradients.")] = "fp32",
) -> None:
    """Show what each block of a workload costs, and where a pipeline would cut it; nothing is trained.

    [bold]meshmark inspect gpt:size=175b[/]                     its blocks, without the memory for them

    [bold]meshmark inspect gpt --pipeline 2[/]                  the cut, and how even it is

    [bold]meshmark inspect gpt --pipeline 2 --schedule 1f1b[/]  the schedule, too
    """
    from harness import inspection, suite_run

    with bad_input():
        options = {"schedule": schedule, "chunks": chunks}
        given = {name: value for name, value in options.items() if value is not None}
        if given and pipeline is None:
            raise ValueError(f"--{next(iter(given))} needs --pipeline N")
        request = None
        if pipeline is not None:
            request = inspection.PipelineRequest(
                num_ranks=pipeline, partition=partition, options=given, draws=schedule is not None
            )
        parts = inspection.inspect(workload, precision=precision, num_micro_batches=micro_batches, pipeline=request)
    inspection.show(suite_run.console_here(), parts)


def report(
    directory: DirectoryArgument,
    format: Annotated[
        Literal["table", "markdown", "json"], typer.Option("--format", help="How to print the results.")
    ] = "table",
) -> None:
    """Print the report of a results directory again.

    [bold]meshmark report results/smoke-20300101-120000 --format markdown > report.md[/]
    """
    from harness import report as reports
    from harness import suite_run
    from harness.result import read

    with bad_input():
        found = read(directory)
        ratios = reports.read_ratios(directory)
    if format == "json":
        suite_run.print_json(found)
    elif format == "markdown":
        print(reports.markdown(found, ratios, directory), end="")
    else:
        console = suite_run.console_here()
        console.print(reports.text(found, ratios, directory, console.width))


def upload(
    measured: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A results directory, or a session of micro-benchmarks (.json).", show_default=False
        ),
    ],
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="MLflow's store. Default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fill MLflow from a results directory, or from a session of micro-benchmarks; doing it twice changes nothing.

    [bold]meshmark upload results/smoke-20300101-120000 --tracking-uri http://mlflow.example:5000[/]

    [bold]meshmark upload .benchmarks/latest.json[/]   what `nox -s micro` measured
    """
    from harness import micro_record, tracking
    from harness.result import read

    with bad_input():
        # What is missing or broken is said before MLflow is imported.
        session = micro_record.read(measured) if micro_record.is_session(measured) else None
        if session is None:
            read(measured)
    if session is not None:
        done = tracking.send([session], kept=measured, tracking_uri=tracking_uri)
    else:
        done = tracking.upload(measured, tracking_uri=tracking_uri)
    print(done.message)
    raise typer.Exit(1 if done.failed else 0)
