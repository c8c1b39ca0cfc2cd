"""In turns: the cases of a suite timed on both sides, ABBA, until each is decided or has had its pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from harness.case import Case
from harness.paired.builds import Build
from harness.paired.side import Timing
from harness.regression.paired_comparison import (
    FIRST_PAIRS,
    MOST_PAIRS,
    Comparison,
    PairedVerdict,
    abba,
    adjusted,
    compare,
    verdicts,
)

ComparedVerdict = Literal["failed", "regressed", "improved", "ok", "not compared"]
RED: frozenset[str] = frozenset({"failed", "regressed"})
_TURN_PAIRS = 2  # of one case, before the next one has its turn: as many as ABBA needs


class Timed(Protocol):
    """What times a case: a Side, in use."""

    @property
    def build(self) -> Build: ...
    def time(self, case: Case) -> Timing: ...


class Told(Protocol):
    """Who hears how far it has come: `done` of `total` pairs of this case, and the seconds of A and B in the last."""

    def pairs_done(self, case: Case, done: int, total: int, a_seconds: float, b_seconds: float) -> None: ...
    def case_ended(self, case: Case, reason: str) -> None: ...


@dataclass(kw_only=True)
class _Pairs:
    """What is known of a case so far. `ended` says why there will be no more of it, and whose fault that is; `hiccups`
    are runs that failed and were taken again, by side."""

    case: Case
    a: list[Timing] = field(default_factory=list)
    b: list[Timing] = field(default_factory=list)
    ended: str = ""
    hiccups: dict[str, Timing] = field(default_factory=dict)
    b_alone_failed: bool = False

    @property
    def seconds(self) -> tuple[list[float], list[float]]:
        a, b = ([timing.seconds for timing in timings if timing.seconds is not None] for timings in (self.a, self.b))
        return a, b


@dataclass(frozen=True, kw_only=True)
class ComparedCase:
    """A case on both sides. `comparison` is None, and `reason` says why, where it could not be timed on both; else
    `reason` says what failed once. `p_value` is adjusted over the suite. `a` and `b` keep every run but those that
    failed and were taken again: these are in `hiccups`."""

    case: Case
    verdict: ComparedVerdict
    reason: str = ""
    comparison: Comparison | None = None
    p_value: float | None = None
    a: tuple[Timing, ...]
    b: tuple[Timing, ...]
    hiccups: tuple[Timing, ...] = ()


def time_in_turns(cases: Sequence[Case], a: Timed, b: Timed, told: Told) -> list[ComparedCase]:
    """Every case FIRST_PAIRS times on each side; those that are undecided then, up to MOST_PAIRS times."""
    assert cases, "something to compare"
    pairs = [_Pairs(case=case) for case in cases]
    due, total = pairs, FIRST_PAIRS
    while due:
        while turn := [each for each in due if not each.ended and len(each.a) < total]:
            for each in turn:
                _take_turn(each, a, b, total, told)
        # More pairs of one case move the adjusted p-values of all, so that one which was decided may not be any more.
        decisions, total = _decisions(pairs), MOST_PAIRS
        due = [each for each in pairs if not each.ended and decisions[each.case.id] == "undecided"]
    return _compared(pairs)


def _take_turn(pairs: _Pairs, a: Timed, b: Timed, total: int, told: Told) -> None:
    """Two pairs of one case."""
    for side in abba(_TURN_PAIRS):
        timed, into = (a, pairs.a) if side == "A" else (b, pairs.b)
        timing = timed.time(pairs.case)
        if timing.status == "failed" and side not in pairs.hiccups:
            # Of so many launches one may meet a full disk; a defect comes again.
            pairs.hiccups[side] = timing
            timing = timed.time(pairs.case)
        into.append(timing)
        if not _has_time(timing):
            pairs.ended = _reason(timing, timed)
            # Where A has no time either there is nothing that B has made worse; what B refuses and A trains is worse.
            pairs.b_alone_failed = side == "B" and _has_time(a.time(pairs.case))
            told.case_ended(pairs.case, pairs.ended)
            return
    a_seconds, b_seconds = pairs.seconds
    told.pairs_done(pairs.case, len(pairs.a), total, a_seconds[-1], b_seconds[-1])


def _has_time(timing: Timing) -> bool:
    return timing.seconds is not None and 0 < timing.seconds < math.inf


def _reason(timing: Timing, side: Timed) -> str:
    return timing.reason or f"{side.build.name}: {timing.status}, without a time"


def _decisions(pairs: Sequence[_Pairs]) -> dict[str, PairedVerdict]:
    timed = [each for each in pairs if not each.ended]
    found = verdicts([compare(*each.seconds) for each in timed])
    return {each.case.id: verdict for each, verdict in zip(timed, found, strict=True)}


def _compared(pairs: Sequence[_Pairs]) -> list[ComparedCase]:
    comparisons = {each.case.id: compare(*each.seconds) for each in pairs if not each.ended}
    p_values = dict(zip(comparisons, adjusted([c.p_value for c in comparisons.values()]), strict=True))
    decisions = _decisions(pairs)
    compared = []
    for each in pairs:
        verdict: ComparedVerdict
        if each.ended:
            verdict = "failed" if each.b_alone_failed else "not compared"
        else:
            decision = decisions[each.case.id]
            verdict = "ok" if decision == "undecided" else decision
        compared.append(
            ComparedCase(
                case=each.case,
                verdict=verdict,
                reason=each.ended or "; ".join(f"failed once, not again: {t.reason}" for t in each.hiccups.values()),
                comparison=comparisons.get(each.case.id),
                p_value=p_values.get(each.case.id),
                a=tuple(each.a),
                b=tuple(each.b),
                hiccups=tuple(each.hiccups.values()),
            )
        )
    return compared
