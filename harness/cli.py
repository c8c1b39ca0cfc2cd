"""The command line: `meshmark run | list | try | inspect | report | compare | upload`.

Nothing heavy is imported until a command needs it: ranks import this file again, and help should be instant.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

BAD_INPUT = 2
INTERRUPTED = 130

app = typer.Typer(
    name="meshmark",
    help=(
        "Run the same training work under many implementations and layouts, and hold each against one process.\n\n"
        "Start with [bold]meshmark list[/], then [bold]meshmark run smoke[/]. Exit code: 0 when every case is ok (or "
        "cannot run here for a stated reason), 1 when a case failed, diverged or ran out of time, 2 for bad input."
    ),
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)

ResultsOption = Annotated[
    Path | None,
    typer.Option("--results", help="Directory for the results. Default: results/SUITE-TIME.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as JSON on standard output, nothing else.")]
NoUploadOption = Annotated[
    bool, typer.Option("--no-upload", help="Leave MLflow alone; `meshmark upload` does it later.")
]
DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A results directory.", show_default=False)]


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected an integer, got {text!r}") from None


def _count(help_text: str) -> Any:
    """An option that is a number; whether it is a possible one, Layout and Measurement know."""
    return typer.Option(metavar="N", help=help_text, parser=_integer)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Bad input gives one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        return int(app(given, prog_name="meshmark", standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        # A usage error of typer; its class has moved between typer's versions.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message().replace("Value error, ", "")  # a word of typer's own for wrong choices
        print(f"meshmark: {_one_line(message)}", file=sys.stderr)
        return BAD_INPUT


@app.command()
def run(
    suite: Annotated[
        str, typer.Argument(metavar="SUITE", help="A name from `meshmark list suites`, or path/to/file.py.")
    ],
    *,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Run the cases whose description, such as `native.ddp data=2 gpt:size=tiny fp32`, contains this; "
            "* and ? are wildcards.",
        ),
    ] = None,
    results: ResultsOption = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Run what is missing in --results (default: the newest run of the suite)."),
    ] = False,
    device: Annotated[
        Literal["cpu", "cuda"],
        typer.Option("--device", help="Where to train: on a GPU each rank takes one of its own."),
    ] = "cpu",
    engine: Annotated[
        Literal["local", "torchrun", "srun"],
        typer.Option(
            "--engine",
            help="What starts the ranks: this command; torchrun on this machine; or torchrun on the nodes of the Slurm "
            "allocation that this command runs in, see `meshmark submit`.",
        ),
    ] = "local",
    ranks_per_node: Annotated[int | None, _count("The most ranks on a node, for torchrun and srun.")] = None,
    as_json: JsonOption = False,
    no_upload: NoUploadOption = False,
) -> None:
    """Run a suite: progress, a table, results.jsonl, report.md, MLflow.

    [bold]meshmark run smoke[/]                          every case of the smoke suite

    [bold]meshmark run peers --only 'native*data=2'[/]   only those cases

    [bold]meshmark run my_suite.py --results out[/]      your own suite, into out/

    [bold]meshmark run smoke --resume[/]                 go on with the newest run
    """
    from harness import engines, suite_run, suites, validation

    with _bad_input():
        loaded = suites.load(suite)
        chosen = loaded if only is None else suites.select(loaded, only)
        starter = engines.load(engine, ranks_per_node)
        chosen = engines.place(chosen, starter)
        validation.check_device(device)
        validation.check(chosen.cases)
        directory = suite_run.directory_for(chosen.name, results, resume=resume)
    again = ["meshmark", "run", suite, *(["--only", only] if only else [])]
    again += [*(["--device", device] if device != "cpu" else []), "--results", str(directory), "--resume"]
    again += [] if ranks_per_node is None else ["--engine", engine, "--ranks-per-node", str(ranks_per_node)]
    raise typer.Exit(
        suite_run.execute(
            chosen,
            directory,
            resume=resume,
            as_json=as_json,
            upload=not no_upload,
            again=again,
            device=device,
            engine=starter,
        )
    )


@app.command()
def submit(
    suite: Annotated[
        str, typer.Argument(metavar="SUITE", help="A name from `meshmark list suites`, or path/to/file.py.")
    ],
    *,
    nodes: Annotated[int, _count("Nodes to ask for.")],
    ranks_per_node: Annotated[int, _count("The most ranks on a node.")],
    only: Annotated[str | None, typer.Option(metavar="PATTERN", help="As for `meshmark run`.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    minutes: Annotated[
        int | None, _count("The job's time limit; by default what the deadlines of all cases add up to.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Another option for sbatch, --gres=gpu:8 say; may be repeated."),
    ] = None,
    results: ResultsOption = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where to train.")] = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, submit nothing.")] = False,
    as_json: JsonOption = False,
    no_upload: NoUploadOption = False,
) -> None:
    """Run a suite as a Slurm job: submit it, follow it, collect the records, and end as `run` does.

    [bold]meshmark submit peers --nodes 2 --ranks-per-node 8 --partition gpu --device cuda[/]

    [bold]meshmark submit smoke --nodes 2 --ranks-per-node 2 --dry-run[/]   the script alone
    """
    from harness import batch_run, suite_run, suites, validation
    from harness import submit as batch

    with _bad_input():
        loaded = suites.load(suite)
        chosen = loaded if only is None else suites.select(loaded, only)
        validation.check(chosen.cases)
        given = results if dry_run and results else suite_run.directory_named(chosen.name)
        directory = (given if dry_run else suite_run.directory_for(chosen.name, results, resume=False)).resolve()
        command = ["run", suite, *(["--only", only] if only else []), "--device", device, "--engine", "srun"]
        command += ["--ranks-per-node", str(ranks_per_node), "--results", str(directory), "--no-upload"]
        job = batch.Job(
            name=f"meshmark-{chosen.name}",
            num_nodes=nodes,
            ranks_per_node=ranks_per_node,
            command=command,
            directory=directory,
            limit_seconds=batch.limit_seconds(chosen) if minutes is None else 60.0 * minutes,
            partition=partition,
            account=account,
            extra=tuple(sbatch or ()),
        )
    if dry_run:
        print(batch.script(job), end="")
        raise typer.Exit
    raise typer.Exit(batch_run.execute(chosen, job, as_json=as_json, upload=not no_upload))


@app.command("try")
def try_one(
    implementation: Annotated[
        str,
        typer.Argument(metavar="IMPLEMENTATION", help="From `meshmark list implementations`, or file.py:Class."),
    ],
    *,
    workload: Annotated[
        str, typer.Option(metavar="W", help="From `meshmark list workloads`, with options, or file.py:builder.")
    ] = "gpt",
    data: Annotated[int, _count("Data-parallel degree.")] = 1,
    shard: Annotated[int | None, _count("Shards within the data degree; all of it by default.")] = None,
    tensor: Annotated[int, _count("Tensor-parallel degree.")] = 1,
    pipeline: Annotated[int, _count("Pipeline stages.")] = 1,
    precision: Annotated[str, typer.Option(help="fp32, fp64, bf16 or bf16_fp32_gradients.")] = "fp32",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="K=V", help="An option of the implementation; may be repeated."),
    ] = None,
    steps: Annotated[int, _count("Timed steps; 0 checks parity alone.")] = 10,
    nodes: Annotated[int, _count("Emulated nodes that the ranks are spread over.")] = 1,
    link_mbits: Annotated[
        float | None, typer.Option(metavar="MBITS", help="The rate of each node's link; unshaped by default.")
    ] = None,
    delay_ms: Annotated[float, typer.Option(metavar="MS", help="The delay between two nodes.")] = 0.0,
    placement: Annotated[str, typer.Option(help="contiguous fills a node before the next; scattered deals out.")] = (
        "contiguous"
    ),
    results: ResultsOption = None,
    as_json: JsonOption = False,
    no_upload: NoUploadOption = False,
) -> None:
    """Run one case beside its single-process reference.

    [bold]meshmark try native.ddp --data 2[/]

    [bold]meshmark try native.ddp --data 4 --option reduction=ring --workload gpt:tied=true --precision fp64[/]

    [bold]meshmark try torch.ddp --data 2 --workload my_workload.py:sine --steps 50[/]

    [bold]meshmark try native.zero --data 4 --nodes 2 --link-mbits 200[/]
    """
    from harness import suite_run, validation
    from harness.case import Case, Measurement, Suite
    from harness.layout import Layout
    from harness.topology import Topology

    with _bad_input():
        measurement = Measurement(timed_steps=steps)
        options = validation.options_from(_options(option or []), implementation)
        layout = Layout(data=data, shard=shard, tensor=tensor, pipeline=pipeline)
        tried = Case(
            workload=workload,
            implementation=implementation,
            layout=layout,
            topology=None
            if (nodes, link_mbits, delay_ms) == (1, None, 0.0)
            else Topology.of(layout.world_size, nodes, link_mbits=link_mbits, delay_ms=delay_ms, placement=placement),
            options=options,
            precision=precision,
            role="floor" if validation.is_floor(implementation, options) else "subject",
            measurement=measurement,
        )
        reference = Case(
            workload=workload,
            implementation="reference",
            precision=precision,
            role="reference",
            measurement=measurement,
        )
        suite = Suite(name="try", cases=tuple({case.id: case for case in (reference, tried)}.values()))
        validation.check(suite.cases)
        directory = suite_run.directory_for(suite.name, results, resume=False)
    raise typer.Exit(
        suite_run.execute(suite, directory, resume=False, as_json=as_json, upload=not no_upload, again=None)
    )


@app.command("list")
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


@app.command()
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
    pipeline: Annotated[int | None, _count("Cut the blocks for so many ranks.")] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="S", help="A pipeline schedule, such as 1f1b; its timeline is drawn.")
    ] = None,
    chunks: Annotated[int | None, _count("Stages on each rank, where the schedule takes several.")] = None,
    micro_batches: Annotated[int | None, _count("Micro-batches a step; by default the workload's.")] = None,
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

    with _bad_input():
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


@app.command()
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

    with _bad_input():
        found = read(directory)
        ratios = reports.read_ratios(directory)
    if format == "json":
        suite_run.print_json(found)
    elif format == "markdown":
        print(reports.markdown(found, ratios, directory), end="")
    else:
        console = suite_run.console_here()
        console.print(reports.text(found, ratios, directory, console.width))


@app.command()
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
    """Make a page that compares the strategies of a run: memory, bytes, latencies, time and lines, side by side.

    [bold]meshmark compare results/sharding-20300101-120000 --out sharding.md[/]
    """
    from harness import comparison, comparison_page

    with _bad_input():
        found = comparison.read_run(results)
        page = comparison_page.page(found, results)
        if out is not None:
            out.write_text(page, encoding="utf-8")
    print(page if out is None else f"{out}: {len(found)} cases", end="" if out is None else "\n")


@app.command()
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

    with _bad_input():
        read(directory)  # a missing or broken directory is said before MLflow is imported
    done = tracking.upload(directory, tracking_uri=tracking_uri)
    print(done.message)
    raise typer.Exit(1 if done.failed else 0)


def _options(texts: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--option: expected key=value, got {text!r}")
        options[key] = value
    return options


@contextmanager
def _bad_input() -> Iterator[None]:
    """Turns what is wrong with the user's input into one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"meshmark: {_one_line(str(error))}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None


def _one_line(text: str) -> str:
    return " ".join(text.split())
