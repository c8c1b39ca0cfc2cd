"""Commands from which people choose a strategy: choose, dashboard."""

from __future__ import annotations

import json
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.commands.arguments import JsonOption, bad_input, count, warning_line

_SuiteRuns = Annotated[
    list[str] | None,
    typer.Option(
        "--suite-run",
        metavar="ID",
        help="A suite run in MLflow; may be repeated. Default: the latest of each suite, and where it has but some of "
        "the suite's cases, those before it for the others.",
        show_default=False,
    ),
]
_Directories = Annotated[
    list[Path] | None,
    typer.Option(
        "--results",
        metavar="DIR",
        help="A results directory instead of MLflow; may be repeated.",
        show_default=False,
    ),
]


def choose(
    *,
    devices: Annotated[int, count("How many devices there are.")],
    memory: Annotated[str, typer.Option(metavar="BYTES", help="The memory of each: 24GiB, 512MiB.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="W",
            help="A workload, or enough of it to tell it from the others: gpt:size=17m. Default: the only one.",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="P", help="fp32, bf16, ... Default: the only one.", show_default=False),
    ] = None,
    nodes: Annotated[int, count("How many nodes the devices are spread over.")] = 1,
    link_mbits: Annotated[
        float | None, typer.Option(metavar="MBITS", help="The rate of each node's link; unshaped by default.")
    ] = None,
    delay_ms: Annotated[float, typer.Option(metavar="MS", help="The delay between two nodes.")] = 0.0,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="The machine that measured, or the beginning of its fingerprint. Default: the last one.",
            show_default=False,
        ),
    ] = None,
    suite_run: _SuiteRuns = None,
    results: _Directories = None,
    as_json: JsonOption = False,
) -> None:
    """Rank the strategies that fit: by measured speed, with memory, exposed communication, parity, and why.

    [bold]meshmark choose --devices 4 --memory 24GiB --model gpt:size=17m[/]

    [bold]meshmark choose --devices 4 --memory 200MiB --nodes 2 --link-mbits 200 --results results/topologies[/]

    Where nothing was measured on so many devices, memory and bytes are predicted and marked so.
    """
    from harness import suite_run as runs
    from harness.choosing import answer, sources
    from harness.choosing.amounts import parse_bytes
    from harness.choosing.candidates import Place
    from harness.topology import Topology

    with bad_input():
        if devices < 1:
            raise ValueError(f"--devices: expected at least 1, got {devices}")
        Topology.of(devices, nodes, link_mbits=link_mbits, delay_ms=delay_ms)
        stored = [] if results else _runs_in_store(suite_run or ())
        found = sources.from_directories(results) if results else sources.from_store(stored, suite_run or (), machine)
        said = answer.answer(
            found,
            model=model,
            precision=precision,
            place=Place(num_devices=devices, num_nodes=nodes, link_mbits=link_mbits, delay_ms=delay_ms),
            memory_bytes=parse_bytes(memory),
            machine=machine,
            elsewhere=sources.places_of_work(stored),
            on_progress=lambda text: print(text, file=sys.stderr),
        )
    if as_json:
        print(json.dumps(answer.to_json(said), indent=1, allow_nan=False))
    else:
        runs.console_here().print(answer.table(said))


def dashboard(
    *,
    suite_run: _SuiteRuns = None,
    results: _Directories = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the page.")] = Path("dashboard.html"),
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    predict: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="Predict memory and bytes on so many devices, too; may be repeated, 0: not at all. Default: twice the "
            "most that were measured.",
            show_default=False,
        ),
    ] = None,
    no_upload: Annotated[bool, typer.Option("--no-upload", help="Leave MLflow alone.")] = False,
) -> None:
    """Make the page from which people choose a strategy: one file, which needs no network.

    [bold]meshmark dashboard --open[/]                                 the latest run of each suite in MLflow

    [bold]meshmark dashboard --results results/a --results results/b[/]  several runs in one page
    """
    from harness.choosing import dashboards, origins, sources
    from harness.choosing.candidates import latest

    with bad_input():
        if any(number < 0 for number in predict or ()):
            raise ValueError(f"--predict: expected numbers of devices, got {' '.join(map(str, predict or ()))}")
        if results:
            found, nights = sources.from_directories(results), sources.nights_from_directories(results)
        else:
            runs = _runs_in_store(suite_run or ())
            found = sources.from_store(runs, suite_run or ())
            nights = sources.nights_from_store(runs, {result.suite for result in found})
        counts = None if predict is None else [number for number in predict if number]
        predicted = dashboards.predictions(found, counts, lambda text: print(text, file=sys.stderr))
        text = dashboards.made(found, nights, predicted)
        out.write_text(text, encoding="utf-8")
    shown = latest(found)
    print(f"{out}: {len(shown)} cases of {origins.suite_runs(shown)}")
    for sentence in origins.completed(found):
        print(sentence)
    if not no_upload:
        with warning_line():
            taken = dashboards.publish(text, {result.suite_run for result in shown if result.suite_run})
            print(f"in MLflow beside {', '.join(taken)}" if taken else "not in MLflow: none of its suite runs is there")
    if open_it:
        webbrowser.open(out.resolve().as_uri())


def _runs_in_store(named: Sequence[str]) -> list[Mapping[str, Any]]:
    """Every case in MLflow; a line for suite runs that are left out for their date."""
    from harness.choosing import sources

    runs, warning = sources.dated_soundly(sources.case_runs_in_store(), named, time.time())
    if warning:
        print(f"meshmark: {warning}", file=sys.stderr)
    return runs
