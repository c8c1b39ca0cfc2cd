"""Commands that train: run, submit, try."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import typer

from harness.commands.arguments import JsonOption, NoUploadOption, ResultsOption, bad_input, count


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
        Literal["local", "torchrun", "srun", "pods"],
        typer.Option(
            "--engine",
            help="What starts the ranks: this command; torchrun on this machine; torchrun on the nodes of the Slurm "
            "allocation, or in the pods of the TrainJob, that this command runs in, see `meshmark submit`.",
        ),
    ] = "local",
    ranks_per_node: Annotated[int | None, count("The most ranks on a node; not for the engine local.")] = None,
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
    from harness.launch import pods

    with bad_input():
        if engine == "pods" and (place := pods.Place.here()).node > 0:
            pods.serve(place)
            raise typer.Exit
        loaded = suites.load(suite)
        chosen = loaded if only is None else suites.select(loaded, only)
        starter = engines.load(engine, ranks_per_node)
        chosen = engines.place(chosen, starter)
        validation.check_device(device)
        validation.check(chosen.cases)
        directory = suite_run.directory_for(chosen.name, results, resume=resume)
    asked = ["meshmark", "run", suite, *(["--only", only] if only else [])]
    asked += ["--device", device] if device != "cpu" else []
    asked += ["--engine", engine] if engine != "local" else []
    asked += [] if ranks_per_node is None else ["--ranks-per-node", str(ranks_per_node)]
    again = [*asked, "--results", str(directory), "--resume"]
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
            command=asked,
        )
    )


def submit(
    suite: Annotated[
        str, typer.Argument(metavar="SUITE", help="A name from `meshmark list suites`, or path/to/file.py.")
    ],
    *,
    nodes: Annotated[int, count("Nodes to ask for.")],
    ranks_per_node: Annotated[int, count("The most ranks on a node.")],
    only: Annotated[str | None, typer.Option(metavar="PATTERN", help="As for `meshmark run`.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    minutes: Annotated[
        int | None, count("The job's time limit; by default what the deadlines of all cases add up to.")
    ] = None,
    wait_minutes: Annotated[
        int | None,
        count("How long the job may wait for its start; by default for its turn, and 30 for nodes that are down."),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Another option for sbatch, --gres=gpu:8 say; may be repeated."),
    ] = None,
    results: ResultsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="As for `meshmark run`.")] = False,
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where to train.")] = "cpu",
    engine: Annotated[
        Literal["slurm", "kubernetes"],
        typer.Option(
            "--engine", help="Whose job; kubernetes renders a TrainJob of Kubeflow Trainer v2, with --dry-run."
        ),
    ] = "slurm",
    image: Annotated[
        str | None,
        typer.Option(
            help="For kubernetes: a container image in which `python -m harness` works; meshmark:latest by default."
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="For kubernetes: the ClusterTrainingRuntime, of the torch kind; torch-distributed by default."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, submit nothing.")] = False,
    as_json: JsonOption = False,
    no_upload: NoUploadOption = False,
) -> None:
    """Run a suite as a Slurm job: submit it, follow it, collect the records, and end as `run` does.

    [bold]meshmark submit peers --nodes 2 --ranks-per-node 8 --partition gpu --device cuda[/]

    [bold]meshmark submit smoke --nodes 2 --ranks-per-node 2 --dry-run[/]   the script alone

    [bold]meshmark submit smoke --nodes 2 --ranks-per-node 2 --engine kubernetes --results /shared/r --dry-run[/]
    """
    from harness import batch_run, suite_run, suites, train_job, validation
    from harness import submit as batch

    with bad_input():
        if engine == "kubernetes" and not dry_run:
            raise ValueError(
                "--engine kubernetes: expected --dry-run, whose output is for `kubectl apply -f -`; got none"
            )
        if engine == "kubernetes" and results is None:
            raise ValueError("--engine kubernetes: expected --results, a directory that all pods see; got none")
        of_the_other: dict[str, object] = {
            "--partition": partition,
            "--account": account,
            "--wait-minutes": wait_minutes,
            "--sbatch": sbatch,
        }
        if engine == "slurm":
            of_the_other = {"--image": image, "--runtime": runtime}
        if misplaced := [name for name, value in of_the_other.items() if value is not None]:
            raise ValueError(f"--engine {engine}: expected none of the other engine's options, got {misplaced[0]}")
        loaded = suites.load(suite)
        chosen = loaded if only is None else suites.select(loaded, only)
        validation.check(chosen.cases)
        given = results if dry_run and results else suite_run.directory_named(chosen.name)
        directory = (given if dry_run else suite_run.directory_for(chosen.name, results, resume=resume)).resolve()
        command = ["run", suite, *(["--only", only] if only else []), "--device", device]
        command += ["--engine", "srun" if engine == "slurm" else "pods"]
        command += ["--ranks-per-node", str(ranks_per_node), "--results", str(directory), "--no-upload"]
        command += ["--resume"] if resume else []
        job = batch.Job(
            name=f"meshmark-{chosen.name}",
            num_nodes=nodes,
            ranks_per_node=ranks_per_node,
            command=command,
            directory=directory,
            limit_seconds=batch.limit_seconds(chosen) if minutes is None else 60.0 * minutes,
            wait_seconds=None if wait_minutes is None else 60.0 * wait_minutes,
            partition=partition,
            account=account,
            extra=tuple(sbatch or ()),
        )
    if dry_run:
        made_by = {"image": image or "meshmark:latest", "runtime": runtime or "torch-distributed"}
        manifest = partial(train_job.manifest, job, **made_by, device=device)
        print(batch.script(job) if engine == "slurm" else manifest(), end="")
        raise typer.Exit
    named = {
        "--only": only,
        "--partition": partition,
        "--account": account,
        "--minutes": minutes,
        "--wait-minutes": wait_minutes,
    }
    again = ["meshmark", "submit", suite, "--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node)]
    again += [word for name, value in named.items() if value is not None for word in (name, str(value))]
    again += [f"--sbatch={option}" for option in sbatch or ()]
    again += [*(["--device", device] if device != "cpu" else []), "--results", str(directory), "--resume"]
    raise typer.Exit(batch_run.execute(chosen, job, as_json=as_json, upload=not no_upload, again=again))


def try_one(
    implementation: Annotated[
        str,
        typer.Argument(metavar="IMPLEMENTATION", help="From `meshmark list implementations`, or file.py:Class."),
    ],
    *,
    workload: Annotated[
        str, typer.Option(metavar="W", help="From `meshmark list workloads`, with options, or file.py:builder.")
    ] = "gpt",
    data: Annotated[int, count("Data-parallel degree.")] = 1,
    shard: Annotated[int | None, count("Shards within the data degree; all of it by default.")] = None,
    tensor: Annotated[int, count("Tensor-parallel degree.")] = 1,
    pipeline: Annotated[int, count("Pipeline stages.")] = 1,
    precision: Annotated[str, typer.Option(help="fp32, fp64, bf16 or bf16_fp32_gradients.")] = "fp32",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="K=V", help="An option of the implementation; may be repeated."),
    ] = None,
    steps: Annotated[int, count("Timed steps; 0 checks parity alone.")] = 10,
    nodes: Annotated[int, count("Emulated nodes that the ranks are spread over.")] = 1,
    link_mbits: Annotated[
        float | None, typer.Option(metavar="MBITS", help="The rate of each node's link; unshaped by default.")
    ] = None,
    delay_ms: Annotated[float, typer.Option(metavar="MS", help="The delay between two nodes.")] = 0.0,
    placement: Annotated[
        Literal["contiguous", "scattered", "tensor_inside_node", "shard_group_inside_node"],
        typer.Option(help="contiguous fills a node before the next, scattered deals ranks out to the nodes in turn."),
    ] = "contiguous",
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

    with bad_input():
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


def _options(texts: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--option: expected key=value, got {text!r}")
        options[key] = value
    return options
