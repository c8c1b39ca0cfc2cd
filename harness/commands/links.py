"""The command that measures links: links."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.commands.arguments import bad_input, count
from harness.one_line import one_line

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def links(
    *,
    ranks: Annotated[int, count("Ranks in all.")] = 2,
    nodes: Annotated[
        int | None,
        count(
            "Nodes that the ranks are spread over, emulated on this machine by the engine local. By default the fewest "
            "that take them."
        ),
    ] = None,
    link_mbits: Annotated[
        float | None, typer.Option(metavar="MBITS", help="The rate of each emulated node's link; unshaped by default.")
    ] = None,
    delay_ms: Annotated[float, typer.Option(metavar="MS", help="The delay between two emulated nodes.")] = 0.0,
    operation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="all_reduce, all_gather, reduce_scatter, all_to_all or point_to_point; may be repeated. By default "
            "all of them.",
        ),
    ] = None,
    smallest: Annotated[str, typer.Option(metavar="SIZE", help="The smallest payload: 1024, 4K, 1M.")] = "4K",
    largest: Annotated[str, typer.Option(metavar="SIZE", help="The largest payload.")] = "16M",
    factor: Annotated[int, count("From one size to the next.")] = 4,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", help="gloo on CPUs; NCCL on GPUs, one a rank.")
    ] = "cpu",
    engine: Annotated[
        Literal["local", "torchrun", "srun"], typer.Option("--engine", help="What starts the ranks, as for `run`.")
    ] = "local",
    ranks_per_node: Annotated[int | None, count("The most ranks on a node, for torchrun and srun.")] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the table.")] = Path("links.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, nothing else.")] = False,
) -> None:
    """Measure what collectives reach between ranks, by size, and keep the table for predictions.

    [bold]meshmark links --ranks 4[/]                                    processes of this machine

    [bold]meshmark links --ranks 4 --nodes 2 --link-mbits 200[/]         over emulated nodes

    [bold]meshmark links --ranks 8 --device cuda --largest 1G[/]         NCCL, one GPU a rank
    """
    with bad_input():
        sizes_bytes = (_bytes("--smallest", smallest), _bytes("--largest", largest))
    from harness import engines, link_table, measured_links, suite_run, validation
    from harness.launch.failure import LaunchFailed
    from harness.topology import Topology

    def show(name: str, payload_bytes: int, done: int, total: int) -> None:
        print(f"[{done + 1}/{total}] {name} {payload_bytes:,} bytes", file=sys.stderr, flush=True)

    with bad_input():
        if ranks < 2:
            raise ValueError(f"--ranks: expected at least 2, got {ranks}")
        validation.check_device(device)
        sizes = link_table.sizes_between(*sizes_bytes, factor)
        if unknown := [name for name in operation or () if name not in link_table.OPERATIONS]:
            raise ValueError(f"--operation: expected one of {', '.join(link_table.OPERATIONS)}, got {unknown[0]!r}")
        if out.is_dir() or not os.access(out.parent, os.W_OK):
            raise ValueError(f"--out {out}: expected a file in a directory that exists and can be written to")
        starter = engines.load(engine, ranks_per_node)
        num_nodes = starter.fewest_nodes(ranks) if nodes is None else nodes
        topology = Topology.of(ranks, num_nodes, link_mbits=link_mbits, delay_ms=delay_ms)
        try:
            with suite_run.termination_interrupts():
                table = measured_links.measure(
                    topology,
                    [name for name in link_table.OPERATIONS if not operation or name in operation],
                    sizes,
                    engine=starter,
                    device=device,
                    on_progress=show,
                )
        except LaunchFailed as failure:
            print(f"meshmark: links: {one_line(failure.reason or failure.status)}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt as interrupt:
            print("meshmark: links: interrupted, nothing is kept", file=sys.stderr)
            raise typer.Exit(suite_run.exit_code_of(interrupt)) from None
        link_table.write(table, out)
    if as_json:
        print(json.dumps(table.to_json(), indent=1, allow_nan=False))
    else:
        print("\n".join([*link_table.lines(table), "", f"kept in {out}"]))


def _bytes(option: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{option}: expected a size such as 1024, 4K or 16M, got {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]
