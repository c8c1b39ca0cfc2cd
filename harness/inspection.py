"""What `meshmark inspect` shows of a workload: what its blocks cost, where a pipeline would cut them, and how even that
is. Nothing is trained; only a partition by time builds the model."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from harness import implementation, models
from harness.block_costs import BlockCosts, analyse
from harness.block_times import block_seconds
from harness.chain import NoChain, reasons
from harness.layout import Layout
from harness.measure.predicted_memory import largest_micro_batch, registry
from harness.parameters import LogicalParameter, replicated_state_bytes
from harness.partition import StageCost, cut, imbalance
from harness.pipeline_marks import PredictedPipeline
from harness.report import figure
from harness.stage_costs import Partition, activation_bytes, stage_costs, state_bytes
from harness.workload import Workload, children_of_sequential, in_precision

_MIB = 2**20
_GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """`num_ranks` ranks under a schedule with these `options`; `draws` its timeline."""

    num_ranks: int
    partition: Partition
    options: Mapping[str, Any]
    draws: bool


def inspect(
    text: str, *, precision: str, num_micro_batches: int | None, pipeline: PipelineRequest | None
) -> Iterable[RenderableType]:
    """The parts of the report. ValueError for a workload, a schedule or numbers that cannot be, before the first."""
    workload = in_precision(models.load(text), precision)
    if num_micro_batches is not None:
        workload = replace(workload, training=replace(workload.training, num_micro_batches=num_micro_batches))
    if pipeline is not None and workload.chain is None:
        raise ValueError(f"--pipeline: workload {text} has no chain: it does not say which blocks follow each other")
    try:
        blocks = analyse(workload if workload.chain else replace(workload, chain=children_of_sequential))
    except NoChain as error:
        if pipeline is not None:
            raise
        return _without_blocks(workload, str(error).removeprefix("pipeline: "))
    names = short([block.name for block in blocks])
    blocks = tuple(replace(block, name=name) for block, name in zip(blocks, names, strict=True))
    stages = None if pipeline is None else _Stages(workload, blocks, pipeline)
    return _parts(workload, blocks, stages)


def _without_blocks(workload: Workload, reason: str) -> list[RenderableType]:
    """A model that cannot be run without values: its parameters are all that is known."""
    with reasons("the model cannot be built without values"):
        parameters = registry(workload)
    states = _mib(_state_bytes(workload, parameters))
    known = f"{_title(workload)}, {_num_elements(parameters):,} parameters, {states} MiB of states"
    return [Text(known), Text(f"no table of blocks: {reason}")]


def show(console: Console, parts: Iterable[RenderableType]) -> None:
    """A timeline that a terminal is too narrow for ends with an ellipsis there; in a file its lines are whole."""
    for part in parts:
        in_a_file = isinstance(part, Text) and not console.is_terminal
        console.print(part, overflow="ignore" if in_a_file else "ellipsis", soft_wrap=in_a_file)


def _parts(workload: Workload, blocks: Sequence[BlockCosts], stages: _Stages | None) -> Iterator[RenderableType]:
    yield blocks_table(workload, blocks)
    yield from (Text(line) for line in _notes(workload, blocks))
    if stages is not None:
        yield stages.table()
        yield stages.partitions_table()
        yield from stages.timeline()


def blocks_table(workload: Workload, blocks: Sequence[BlockCosts]) -> Table:
    """One row a block, or several alike one after another, with figures of each."""
    table = _table(
        _title(workload),
        *("block", "n", "kind", "parameters", "states MiB", "hands on", "MiB", "keeps MiB"),
        *("GFLOP forward", "backward"),
    )
    counted: set[str] = set()
    rows = []
    for block in blocks:
        own = [parameter for parameter in block.parameters if parameter.name not in counted]
        tied = " + tied" if len(own) < len(block.parameters) else ""
        counted |= {parameter.name for parameter in own}
        shown = (
            *(block.kind, f"{_num_elements(own):,}{tied}", _mib(_state_bytes(workload, own)), _shapes(block)),
            *(_mib(block.border_bytes) if block.border else "-", _mib(block.kept_bytes)),
            *(figure(block.forward_flops, 1 / _GIGA), figure(block.backward_flops, 1 / _GIGA)),
        )
        rows.append((block.name, shown))
    for shown, alike in groupby(rows, key=lambda row: row[1]):
        names = [name for name, _ in alike]
        table.add_row(*map(Text, (_span(names), str(len(names)), *shown)))
    every = {parameter.name: parameter for block in blocks for parameter in block.parameters}.values()
    table.add_section()
    table.add_row(
        *("total", str(len(blocks)), "", f"{_num_elements(every):,}", _mib(_state_bytes(workload, every)), "", ""),
        _mib(sum(block.kept_bytes for block in blocks)),
        figure(sum(block.forward_flops for block in blocks), 1 / _GIGA),
        figure(sum(block.backward_flops for block in blocks), 1 / _GIGA),
    )
    return table


def _notes(workload: Workload, blocks: Sequence[BlockCosts]) -> Iterator[str]:
    yield "each of n; states: parameters, gradients, optimizer; keeps: activations that wait for backward"
    users: dict[str, list[str]] = {}
    for block in blocks:
        for parameter in block.parameters:
            users.setdefault(parameter.name, []).append(block.name)
    for name, of in users.items():
        if len(of) > 1:
            yield f"tied: {name} is used by {', '.join(of)} and counted once; every stage of these holds it"
    if workload.chain is None:
        yield "no chain: the workload does not say which blocks follow each other, so that no pipeline can cut it"


class _Stages:
    """A chain cut for a pipeline."""

    def __init__(self, workload: Workload, blocks: Sequence[BlockCosts], request: PipelineRequest) -> None:
        self._workload, self._blocks, self._request = workload, blocks, request
        self._foreseen = _foreseen(workload, request)
        num_stages = len(self._foreseen.in_flight)
        if num_stages > len(blocks):
            raise ValueError(
                f"--pipeline {request.num_ranks}: {num_stages} stages need as many blocks, got the {len(blocks)} of "
                f"{workload.name}"
            )
        seconds = _seconds(workload) if request.partition == "time" else None
        self._costs = stage_costs(workload, blocks, self._foreseen.in_flight, seconds)
        self._cuts = {name: cut(len(blocks), num_stages, cost) for name, cost in self._costs.items()}

    def table(self) -> Table:
        foreseen, partition = self._foreseen, self._request.partition
        num_micro_batches = self._workload.training.num_micro_batches
        table = _table(
            f"{len(foreseen.in_flight)} stages by {partition}; {foreseen.schedule}, "
            f"micro-batches: {num_micro_batches}, bubble {figure(foreseen.bubble_ratio, 100)} %",
            *("stage", "rank", "blocks", "parameters", "FLOPs %", *(["ms"] if "time" in self._costs else [])),
            *("states MiB", "in flight", "activations MiB", "sum MiB"),
        )
        states, activations = state_bytes(self._workload, self._blocks), activation_bytes(self._blocks)
        all_flops = sum(block.flops for block in self._blocks)
        for stage, blocks in enumerate(self._cuts[partition]):
            ends = (stage, blocks.start, blocks.stop)
            held = foreseen.in_flight[stage] * activations(*ends)
            table.add_row(
                *(str(stage), str(stage % self._request.num_ranks)),
                Text(_span([self._blocks[b].name for b in blocks])),
                f"{self._costs['parameters'](*ends):,.0f}",
                figure(self._costs["flops"](*ends) / all_flops if all_flops else None, 100),
                *([figure(self._costs["time"](*ends), 1e3)] if "time" in self._costs else []),
                *(_mib(states(*ends)), str(foreseen.in_flight[stage]), _mib(held), _mib(states(*ends) + held)),
            )
        return table

    def partitions_table(self) -> Table:
        """By how much the costliest stage exceeds the mean: a row for each way to cut, a column for each cost."""
        table = _table(
            "imbalance: the costliest stage above the mean of all, %", "--partition", "blocks a stage", *self._costs
        )
        for name, stages in self._cuts.items():
            lengths = " ".join(str(len(blocks)) for blocks in stages)
            shares = [_percent(stages, cost) for cost in self._costs.values()]
            style = "bold" if name == self._request.partition else ""
            table.add_row(name, lengths, *shares, style=style)
        if "time" not in self._costs:
            table.caption = "--partition time builds the model and measures each block here"
            table.caption_justify = "left"
        return table

    def timeline(self) -> Iterator[Text]:
        if self._request.draws:
            yield Text(f"{self._foreseen.schedule}, a forward 1 wide, a backward 2:", style="bold")
            yield Text(self._foreseen.timeline.rstrip("\n"), no_wrap=True)


def _foreseen(workload: Workload, request: PipelineRequest) -> PredictedPipeline:
    """That of the first implementation that runs such a schedule."""
    refusals = []
    for name in implementation.names():
        try:
            kind = implementation.load(name)
        except Exception:  # whatever a third-party library raises while it is imported
            continue
        try:
            foreseen = kind.predicted_pipeline(workload, Layout(pipeline=request.num_ranks), request.options)
        except ValueError as error:
            refusals.append(error)
        else:
            if foreseen is not None:
                return foreseen
    raise refusals[0] if refusals else ValueError("--pipeline: no implementation here has a schedule")


def _seconds(workload: Workload) -> Sequence[float]:
    """With one thread, as ranks have."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return block_seconds(workload, torch.device("cpu"))
    finally:
        torch.set_num_threads(num_threads)


def _percent(stages: Sequence[range], cost: StageCost) -> str:
    return figure(imbalance(stages, cost), 100)


def _title(workload: Workload) -> str:
    return f"{workload.name}, {workload.precision.name}, micro-batches of {largest_micro_batch(workload, 1)} samples"


def _num_elements(parameters: Iterable[LogicalParameter]) -> int:
    return sum(parameter.num_elements for parameter in parameters)


def _state_bytes(workload: Workload, parameters: Iterable[LogicalParameter]) -> int:
    training = workload.training
    return sum(replicated_state_bytes(list(parameters), workload.precision, training.num_moments).values())


def _mib(num_bytes: float) -> str:
    return figure(num_bytes, 1 / _MIB)


def _shapes(block: BlockCosts) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) for tensor in block.border) or "-"


def short(names: Sequence[str]) -> list[str]:
    """Without the modules that all of them lie in."""
    paths = [part.split(".")[:-1] for name in names for part in name.split(" + ")]
    depth = next((d for d, level in enumerate(zip(*paths, strict=False)) if len(set(level)) > 1), min(map(len, paths)))
    return [" + ".join(part.split(".", depth)[-1] for part in name.split(" + ")) for name in names]


def _span(names: Sequence[str]) -> str:
    """`block0-5` for block0 to block5."""
    first, last = names[0], names[-1]
    prefix = first.rstrip(string.digits)
    if first == last:
        return first
    number = last.removeprefix(prefix)
    return f"{first}-{number}" if prefix != first and number.isdecimal() else f"{first} - {last}"


def _table(title: str, *headers: str) -> Table:
    heading = Text(title, style="bold")
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    words = ("block", "kind", "hands on", "blocks", "--partition", "blocks a stage")
    for header in headers:
        table.add_column(header, justify="left" if header in words else "right", overflow="fold")
    return table
