"""Time history: what a series of nights says of the last one.

The last level is held against the fastest one since the accepted night: neither a slow creep nor an improvement that
makes up for half of a regression can hide one. Nor can a step that is excused, such as one that came with another
torch: each step since that level is judged by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
class Step:
    """The level moved at `night`, by `shift` (relative); `is_excused` where that is not the code's doing."""

    night: int
    shift: float
    is_excused: bool


@dataclass(frozen=True, kw_only=True)
class TimeChange:
    """The last night's verdict. `shift` is relative, of the last level (where only the last night is odd, of that)
    against the baseline's; `since` the index of the night from which on the level was another one. What is regressed or
    suspect is so without the steps that are excused, which alone make an environment shift; `steps` are all of them."""

    verdict: Verdict
    shift: float = 0.0
    since: int | None = None
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Slower:
    """The last segment is slower than the segment `fastest` by `move`; `since` is the first one after that level."""

    fastest: int
    since: int
    move: float


def _never(_night: int) -> bool:
    return False


def last_night(
    logarithms: Sequence[float], *, accepted: int = 0, excused: Callable[[int], bool] = _never
) -> TimeChange:
    """Judges the last of a series of log(seconds / canary seconds), oldest first; what was before night `accepted` is
    no baseline any more, and a step at a night that is `excused` is not the code's. ValueError if a value is not
    finite."""
    if len(logarithms) < MIN_NIGHTS:
        return TimeChange(verdict="insufficient data")
    found = segments(logarithms)
    if (slower := _slower(found, logarithms, _first_counted(found, accepted))) is not None:
        return _by_steps(found, logarithms, slower, excused)
    # Now the last level is the fastest since the accepted night, or close to it.
    if len(found.starts) > 1 and found.starts[-1] > accepted and found.levels[-1] < found.levels[-2]:
        shift = math.expm1(found.levels[-1] - found.levels[-2])
        return TimeChange(verdict="improved", shift=shift, since=_first_night(found, logarithms, len(found.starts) - 1))
    if (suspicion := _suspicion(found, logarithms, accepted)) is not None:
        return suspicion
    return TimeChange(verdict="ok", shift=math.expm1(logarithms[-1] - found.levels[-1]))


def _first_counted(found: Segments, accepted: int) -> int:
    """The first segment that reaches beyond the accepted night."""
    ends = (*found.starts[1:], math.inf)
    return next(index for index, end in enumerate(ends) if end > accepted)


def _slower(found: Segments, logarithms: Sequence[float], first: int) -> _Slower | None:
    """By what the last segment is slower than the fastest from `first` on, if it is and the latest nights are not back
    there."""
    fastest = min(range(first, len(found.levels)), key=lambda index: found.levels[index])
    level = found.levels[fastest]
    move = found.levels[-1] - level
    if move <= found.least_move:
        return None
    if all(night - level <= found.least_move for night in logarithms[-RECOVERED_NIGHTS:]):
        return None
    # What came and went in between is not where this one began.
    at_level = [index for index, other in enumerate(found.levels) if other - level <= found.least_move]
    return _Slower(fastest=fastest, since=at_level[-1] + 1, move=move)


def _by_steps(
    found: Segments, logarithms: Sequence[float], slower: _Slower, excused: Callable[[int], bool]
) -> TimeChange:
    """Whose doing it is that the last level is slower: each step since the fastest one is judged by itself, so that
    none hides behind another. What is excused is taken out of the series; what is left is the code's."""
    own_levels, own_nights = list(found.levels), list(logarithms)
    steps = {}
    for segment in range(slower.fastest + 1, len(found.levels)):
        night = _first_night(found, logarithms, segment)
        move = found.levels[segment] - found.levels[segment - 1]
        steps[segment] = Step(night=night, shift=math.expm1(move), is_excused=excused(night))
        if steps[segment].is_excused:
            own_levels[segment:] = [level - move for level in own_levels[segment:]]
            own_nights[night:] = [value - move for value in own_nights[night:]]
    own = replace(found, levels=tuple(own_levels))
    regressed = _slower(own, own_nights, slower.fastest)
    since = slower.since if regressed is None else min(slower.since, regressed.since)
    told = tuple(step for segment, step in steps.items() if segment >= since)
    if regressed is not None:
        shift = math.expm1(regressed.move)
        return TimeChange(verdict="regressed", shift=shift, since=steps[regressed.since].night, steps=told)
    if (suspicion := _suspicion(own, own_nights, found.starts[slower.fastest])) is not None:
        return replace(suspicion, steps=told)
    if not any(step.is_excused for step in told):  # it came earlier, and the code had made up for it by then
        told = tuple(steps.values())
    shift = math.expm1(slower.move)
    return TimeChange(verdict="environment shift", shift=shift, since=steps[slower.since].night, steps=told)


def _suspicion(found: Segments, logarithms: Sequence[float], accepted: int) -> TimeChange | None:
    """What may yet be chance: a level that is slower by weaker evidence, or an odd night."""
    weaker = segments(logarithms, significance=SUSPECT_SIGNIFICANCE)
    if (slower := _slower(weaker, logarithms, _first_counted(weaker, accepted))) is not None:
        since = _first_night(weaker, logarithms, slower.since)
        return TimeChange(verdict="suspect", shift=math.expm1(slower.move), since=since)
    odd = found.levels[-1] + max(found.least_move, ODD_NIGHT_IN_NOISE * found.noise)
    if logarithms[-1] <= odd:
        return None
    # Two nights are no level yet, and of few nights not even three.
    as_before = [index for index, night in enumerate(logarithms) if night <= odd]
    oddity = logarithms[-1] - found.levels[-1]
    return TimeChange(verdict="suspect", shift=math.expm1(oddity), since=max(as_before, default=-1) + 1)


def _first_night(found: Segments, logarithms: Sequence[float], segment: int) -> int:
    """The first night at the level of that segment. A cut leaves three nights on each side even where two have moved:
    the night is looked for around it that parts both levels best."""
    before, after = found.levels[segment - 1 : segment + 1]
    cut = found.starts[segment]
    nights = range(max(1, cut - MIN_SIDE + 1), min(len(logarithms), cut + MIN_SIDE))

    def misfit(first: int) -> float:
        return sum(abs(logarithms[night] - (before if night < first else after)) for night in nights)

    return min(nights, key=lambda first: (misfit(first), abs(first - cut)))
