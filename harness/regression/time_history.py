"""Time history: what a series of nights says of the last one.

The last level is held against the fastest one since the accepted night: neither a slow creep nor an improvement that
makes up for half of a regression can hide one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.regression.change_points import MIN_SIDE, Segments, segments
from harness.regression.verdicts import Verdict

MIN_NIGHTS = 20
MAX_NIGHTS = 90  # older ones say more about the machine than about tonight
SUSPECT_SIGNIFICANCE = 1e-3
ODD_NIGHT_IN_NOISE = 4.0  # robust standard deviations
# So many nights in a row at the fast level end a regression. The cut at its end may never become significant: 8 slow
# and 8 fast nights can be parted in 12,870 ways, of which two are as good, and that is more than one in 10,000.
RECOVERED_NIGHTS = 4


@dataclass(frozen=True, kw_only=True)
class TimeChange:
    """The last night's verdict. `shift` is relative, of the last level (where only the last night is odd, of that)
    against the baseline's; `since` the index of the night from which on the level was another one."""

    verdict: Verdict
    shift: float = 0.0
    since: int | None = None


def last_night(logarithms: Sequence[float], *, accepted: int = 0) -> TimeChange:
    """Judges the last of a series of log(seconds / canary seconds), oldest first; what was before night `accepted` is
    no baseline any more. ValueError if a value is not finite."""
    if len(logarithms) < MIN_NIGHTS:
        return TimeChange(verdict="insufficient data")
    found = segments(logarithms)
    if (slower := _slower(found, logarithms, accepted, "regressed")) is not None:
        return slower
    # Now the last level is the fastest since the accepted night, or close to it.
    if len(found.starts) > 1 and found.starts[-1] > accepted and found.levels[-1] < found.levels[-2]:
        shift = math.expm1(found.levels[-1] - found.levels[-2])
        return TimeChange(verdict="improved", shift=shift, since=_first_night(found, logarithms, len(found.starts) - 1))
    weaker = segments(logarithms, significance=SUSPECT_SIGNIFICANCE)
    if (slower := _slower(weaker, logarithms, accepted, "suspect")) is not None:
        return slower
    oddity = logarithms[-1] - found.levels[-1]
    odd = found.levels[-1] + max(found.least_move, ODD_NIGHT_IN_NOISE * found.noise)
    if logarithms[-1] > odd:
        # Two nights are no level yet, and of few nights not even three.
        as_before = [index for index, night in enumerate(logarithms) if night <= odd]
        return TimeChange(verdict="suspect", shift=math.expm1(oddity), since=max(as_before, default=-1) + 1)
    return TimeChange(verdict="ok", shift=math.expm1(oddity))


def _slower(found: Segments, logarithms: Sequence[float], accepted: int, verdict: Verdict) -> TimeChange | None:
    """The change that the last level is slower by than the fastest since the accepted night, if it is and the latest
    nights are not back there."""
    ends = (*found.starts[1:], math.inf)
    counted = [index for index, end in enumerate(ends) if end > accepted]
    fastest = min(counted, key=lambda index: found.levels[index])
    move = found.levels[-1] - found.levels[fastest]
    if move <= found.least_move:
        return None
    if all(night - found.levels[fastest] <= found.least_move for night in logarithms[-RECOVERED_NIGHTS:]):
        return None
    # What came and went in between is not where this one began.
    level = found.levels[fastest]
    at_level = [index for index, other in enumerate(found.levels) if other - level <= found.least_move]
    return TimeChange(verdict=verdict, shift=math.expm1(move), since=_first_night(found, logarithms, at_level[-1] + 1))


def _first_night(found: Segments, logarithms: Sequence[float], segment: int) -> int:
    """The first night at the level of that segment. A cut leaves three nights on each side even where two have moved:
    the night is looked for around it that parts both levels best."""
    before, after = found.levels[segment - 1 : segment + 1]
    cut = found.starts[segment]
    nights = range(max(1, cut - MIN_SIDE + 1), min(len(logarithms), cut + MIN_SIDE))

    def misfit(first: int) -> float:
        return sum(abs(logarithms[night] - (before if night < first else after)) for night in nights)

    return min(nights, key=lambda first: (misfit(first), abs(first - cut)))
