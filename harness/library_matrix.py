"""The matrix of strategies and libraries: for each strategy of a run, how fast each library's best setting is beside
the best peer, or why there is no figure. Settings over memory that ranks share stand apart from those over the process
group: what they gain is the transport's, which others do not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from harness import implementation
from harness.case import Case
from harness.implementation import Implementation
from harness.markdown import code
from harness.report import figure
from harness.result import Result

_SHARED_MEMORY = "shared_memory"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one setting came to; `setting` is that one, where it is not what its implementation does by itself."""

    text: str
    setting: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One strategy on one work and layout; `cells` by column."""

    strategy: str
    work: str
    cells: dict[str, Cell]


def columns(results: Sequence[Result]) -> list[str]:
    """Whose implementations took part, in the order of the run: `native`, `torch` and so on; a library that has a
    setting over shared memory twice."""
    rivals = [result for result in results if result.case.role in ("subject", "peer")]
    apart = {_library(result) for result in rivals if _transport(result) == _SHARED_MEMORY}
    found: list[str] = []
    for library in dict.fromkeys(map(_library, rivals)):
        both = [_column(library, transport) for transport in ("process_group", _SHARED_MEMORY)]
        found += both if library in apart else [library]
    return found


def matrix(results: Sequence[Result]) -> list[Line]:
    """One line for each strategy that has a subject and a peer side by side. Of a column's settings the fastest that
    trains the reference's model by its recipe counts; where none does, the cell says so."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        if result.case.role in ("subject", "peer"):
            groups.setdefault(result.case.side_by_side, []).append(result)
    names = columns(results)
    found: list[tuple[Case, str, dict[str, Cell]]] = []
    for members in groups.values():
        for strategy in dict.fromkeys(m.strategy for m in members if m.case.role == "subject" and m.strategy):
            rivals = [m for m in members if m.stands_beside(strategy) or _may_be(m, strategy)]
            peers = [m for m in rivals if m.case.role == "peer"]
            if not peers:
                continue
            best = min((s for m in peers if (s := _seconds(m)) is not None), default=None)
            cells = {name: _cell([m for m in rivals if _belongs(m, name, names)], best, strategy) for name in names}
            found.append((members[0].case, strategy, cells))
    works = [(strategy, _work(case)) for case, strategy, _ in found]
    lines = []
    for case, strategy, cells in found:
        work = _work(case)
        # Lines that differ in nothing else are told apart by the name of their comparison.
        is_named = case.comparison and works.count((strategy, work)) > 1
        lines.append(Line(strategy=strategy, work=f"{work}, {case.comparison}" if is_named else work, cells=cells))
    return lines


def _work(case: Case) -> str:
    """With the topology, where that is more than the ranks of this machine."""
    topology = str(case.placed)
    where = [] if topology == f"1x{case.world_size}" else [topology]
    return ", ".join((code(case.workload), str(case.layout), *where, case.precision))


def _belongs(result: Result, column: str, names: Sequence[str]) -> bool:
    library = _library(result)
    return column == (library if library in names else _column(library, _transport(result)))


def _column(library: str, transport: str) -> str:
    return f"{library}, {'shared memory' if transport == _SHARED_MEMORY else 'process group'}"


def _may_be(result: Result, strategy: str) -> bool:
    """Of a library that could not even be loaded nothing is known but what the case is for."""
    return not result.strategy and result.case.comparison in ("", strategy)


def _cell(settings: Sequence[Result], best_peer_seconds: float | None, strategy: str) -> Cell:
    timed = [(seconds, setting) for setting in settings if (seconds := _seconds(setting)) is not None]
    if timed:
        seconds, fastest = min(timed, key=lambda pair: pair[0])
        ratio = "" if best_peer_seconds is None else f" ({figure(seconds / best_peer_seconds)})"
        unchecked = ", parity not checked" if fastest.parity_verdict == "not checked" else ""
        return Cell(text=f"{figure(seconds, 1e3)} ms{ratio}{unchecked}", setting=_setting(fastest, strategy))
    words = ("other work" if setting.status == "ok" and setting.other_work else setting.status for setting in settings)
    return Cell(text=", ".join(dict.fromkeys(words)) or "-")


def _setting(result: Result, strategy: str) -> str:
    """The options that are not what they are by themselves, and that neither the column tells, as it does the
    transport, nor the strategy, as it does its stage."""
    case, kind = result.case, _kind(result.case.implementation)
    told: dict[str, Any] = {}
    if kind is not None:
        told = implementation.options_of(kind)
        if kind.transport_option is not None:
            told[kind.transport_option] = _transport(result)
        if kind.strategy_option is not None:
            # Beside another strategy than its own which one it is says something, be it the default.
            own = case.options.get(kind.strategy_option)
            told[kind.strategy_option] = own if result.strategy == strategy else None
    options = [f"{key}={value}" for key, value in case.options.items() if key not in told or value != told[key]]
    return " ".join([case.implementation, *options]) if options else ""


@cache
def _kind(name: str) -> type[Implementation] | None:
    """None for one that cannot be loaded here: then nobody knows what its options are by themselves."""
    try:
        return implementation.load(name)
    except Exception:  # whatever a third-party library, or a user's file, raises while it is imported
        return None


def _seconds(result: Result) -> float | None:
    """None for one that trains another model than the reference, or does other work: its time is no measure."""
    seconds: Any = result.metrics.get("step.median_seconds")
    return float(seconds) if result.is_a_measure and seconds is not None else None


def _transport(result: Result) -> str:
    """The one that it ran over, where that is another than it was asked for; empty for one that has no choice."""
    kind = _kind(result.case.implementation)
    if kind is None or (option := kind.transport_option) is None:
        return ""
    facts = result.environment.get("facts") or {}
    default = implementation.options_of(kind).get(option, "")
    return str(facts.get(option, result.case.options.get(option, default)))


def _library(result: Result) -> str:
    return result.case.implementation.partition(".")[0]
