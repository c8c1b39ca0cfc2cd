"""The matrix of strategies and libraries: for each strategy of an interleaved run, how fast each library's best setting
is beside the best peer, or why there is no figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.markdown import code
from harness.report import figure
from harness.result import Result


@dataclass(frozen=True, kw_only=True)
class Line:
    """One strategy on one work and layout; `cells` are texts, by library."""

    strategy: str
    work: str
    cells: dict[str, str]


def libraries(results: Sequence[Result]) -> list[str]:
    """Whose implementations took part, in the order of the run: `native`, `torch` and so on."""
    return list(dict.fromkeys(_library(r) for r in results if r.case.role in ("subject", "peer")))


def matrix(results: Sequence[Result]) -> list[Line]:
    """One line for each strategy that has a subject and a peer side by side. Of a library's settings the fastest that
    trains the reference's model by its recipe counts; where none does, the cell says so."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        if result.case.role in ("subject", "peer"):
            groups.setdefault(result.case.side_by_side, []).append(result)
    lines = []
    for members in groups.values():
        for strategy in dict.fromkeys(m.strategy for m in members if m.case.role == "subject" and m.strategy):
            rivals = [m for m in members if m.stands_beside(strategy) or _may_be(m, strategy)]
            peers = [m for m in rivals if m.case.role == "peer"]
            if not peers:
                continue
            best = min((s for m in peers if (s := _seconds(m)) is not None), default=None)
            cells = {
                library: _cell([m for m in rivals if _library(m) == library], best) for library in libraries(results)
            }
            case = members[0].case
            work = ", ".join((code(case.workload), str(case.layout), case.precision))
            lines.append(Line(strategy=strategy, work=work, cells=cells))
    return lines


def _may_be(result: Result, strategy: str) -> bool:
    """Of a library that could not even be loaded nothing is known but what the case is for."""
    return not result.strategy and result.case.comparison in ("", strategy)


def _cell(settings: Sequence[Result], best_peer_seconds: float | None) -> str:
    timed = [(seconds, setting) for setting in settings if (seconds := _seconds(setting)) is not None]
    if timed:
        seconds, fastest = min(timed, key=lambda pair: pair[0])
        ratio = "" if best_peer_seconds is None else f" ({figure(seconds / best_peer_seconds)})"
        unchecked = ", parity not checked" if fastest.parity_verdict == "not checked" else ""
        return f"{figure(seconds, 1e3)} ms{ratio}{unchecked}"
    words = ("other work" if setting.status == "ok" and setting.other_work else setting.status for setting in settings)
    return ", ".join(dict.fromkeys(words)) or "-"


def _seconds(result: Result) -> float | None:
    """None for one that trains another model than the reference, or does other work: its time is no measure."""
    seconds: Any = result.metrics.get("step.median_seconds")
    return float(seconds) if result.is_a_measure and seconds is not None else None


def _library(result: Result) -> str:
    return result.case.implementation.partition(".")[0]
