"""Commands that show what there is and what was measured: list, inspect, report, compare, upload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.commands.arguments import DirectoryArgument, bad_input, count


def list_all(
    what: Annotated[
        Literal["all", "suites", "implementations", "workloads"],
        typer.Argument(metavar="[suites|implementations|workloads]", help="What to list; everything by default."),
    ] = "all",
) -> None:
    """Show the suites, implementations and workloads there are, and what cannot run here and why."""
    from harness import catalogue, suite_run

    console = suite_run.console_here()
    if what in ("all", "suites"):
        console.print(catalogue.suites_table())
    if what in ("all", "implementations"):
        console.print(catalogue.implementations_table())
        console.print(catalogue.refusals_table())
    if what in ("all", "workloads"):
        console.print(catalogue.workloads_table())


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


def compare(
    results: Annotated[
        Path,
        typer.Argument(metavar="RESULTS", help="A results directory, or the results.jsonl in it.", show_default=False),
    ],
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="PAGE.md", help="Where to write the page. Default: standard output.")
    ] = None,
) -> None:
    """Make a page that compares the strategies of a run: memory, bytes, latencies, time and lines, side by side; of a
    run on one node and on several what the links between them cost.

    [bold]meshmark compare results/sharding-20300101-120000 --out sharding.md[/]
    """
    from harness import comparison, comparison_page, topology_page

    with bad_input():
        found = comparison.read_run(results)
        of_topologies = topology_page.spans_topologies(found)
        page = (topology_page if of_topologies else comparison_page).page(found, results)
        if out is not None:
            out.write_text(page, encoding="utf-8")
    print(page if out is None else f"{out}: {len(found)} cases", end="" if out is None else "\n")


def upload(
    directory: DirectoryArgument,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="MLflow's store. Default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fill MLflow from a results directory; doing it twice changes nothing.

    [bold]meshmark upload results/smoke-20300101-120000 --tracking-uri http://mlflow.example:5000[/]
    """
    from harness import tracking
    from harness.result import read

    with bad_input():
        read(directory)  # a missing or broken directory is said before MLflow is imported
    done = tracking.upload(directory, tracking_uri=tracking_uri)
    print(done.message)
    raise typer.Exit(1 if done.failed else 0)
