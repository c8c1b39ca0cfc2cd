"""Measures a table of links: starts ranks, has them carry out each operation at each size, collects what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from harness import scratch
from harness.case import Case
from harness.engines import Engine, Start
from harness.launch.emulated import EmulatedNodes
from harness.layout import Layout
from harness.link_table import LinkTable, Measurement, Operation, slowest
from harness.topology import Topology

OnProgress = Callable[[Operation, int, int, int], None]
_COMMAND = "collective_seconds"  # of the worker
_SECONDS_A_SIZE = 0.3
_FEWEST_REPEATS, _MOST_REPEATS = 3, 20
_DEADLINE_SECONDS = 600.0


def measure(
    topology: Topology,
    operations: Sequence[Operation],
    sizes: Sequence[int],
    *,
    engine: Engine,
    device: str,
    on_progress: OnProgress,
) -> LinkTable:
    """`on_progress` is told the operation, the size, and how many of how many are done. LaunchFailed where a rank
    fails, OSError where nodes cannot be emulated, ValueError where the engine has no such nodes."""
    case = Case(
        workload="gpt:size=tiny",  # nobody builds it
        implementation="native.floor",
        layout=Layout(data=topology.world_size),
        topology=topology,
        role="floor",
        deadline_seconds=_DEADLINE_SECONDS,
    )
    if reason := engine.unavailable(case):
        raise ValueError(f"links: {reason}")
    emulated = engine.emulates and topology.num_nodes > 1
    measurements: list[Measurement] = []
    with ExitStack() as stack:
        nodes = stack.enter_context(EmulatedNodes(topology)) if emulated else None
        shared = Path.cwd() if engine.shares_files else None
        directory = stack.enter_context(scratch.directory(shared))
        start = Start(case=case, directory=directory, weights=None, device=device, instrumented=False, nodes=nodes)
        ranks = stack.enter_context(engine.launch(start))
        environment = ranks.command("environment")[0]
        for operation in operations:
            for payload_bytes in sizes:
                on_progress(operation, payload_bytes, len(measurements), len(operations) * len(sizes))
                once = slowest(ranks.command(_COMMAND, operation=operation, payload_bytes=payload_bytes, num_repeats=1))
                repeats = min(_MOST_REPEATS, max(_FEWEST_REPEATS, int(_SECONDS_A_SIZE / once[0])))
                answers = ranks.command(_COMMAND, operation=operation, payload_bytes=payload_bytes, num_repeats=repeats)
                measurements.append(
                    Measurement(operation=operation, payload_bytes=payload_bytes, seconds=slowest(answers))
                )
    return LinkTable(
        topology=topology,
        backend="nccl" if device == "cuda" else "gloo",
        emulated=emulated,
        environment=environment,
        measurements=tuple(measurements),
    )
