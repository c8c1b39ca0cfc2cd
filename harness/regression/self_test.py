"""The gate's report on itself: how often it cries wolf, how soon it finds a slowdown, and how soon it lets go of one
that was mended, in simulated nights; and what two commits in turns can tell.

Nights come as they do in use, one after another, each judged with what is known by then. Beside each rate stands that
of a rule people start with: more than 5 % slower than last night.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from harness.regression.paired_self_test import (
    LEAST_FOUND,
    MOST_FALSE,
    PROVEN_SHIFT,
    PairedPower,
    paired_failures,
    paired_powers,
)
from harness.regression.time_history import MAX_NIGHTS, MIN_NIGHTS, last_night

NOISE = 0.02  # standard deviation of a night's logarithm
STEP_NIGHT = 60
FIX_NIGHT = 75  # in series whose slowdown is mended again
SLOWDOWNS = (0.03, 0.05, 0.1)
LAST_NIGHT_RULE = 0.05
QUIET_SERIES, COMPARISONS = 4, 20  # for each series with a slowdown, by default
# What must hold, or the gate is broken. In large simulations such a detector alarms 0.3 to 1.7 times in 1,000 nights,
# by the kind of noise: no more alarms are allowed than 99 of 100 samples as small as this one hold at 1.7. There it
# finds all 5 % slowdowns at 2 % noise, half of them within 2 to 7 nights; the median of ten may lie one night later.
FALSE_ALARMS_PER_1000, CONFIDENCE = 1.7, 0.99
PROVEN_SLOWDOWN, MAX_MEDIAN_DELAY_NIGHTS = 0.05, 8.0
# Once it is mended the alarm ends in all of them, half within 6 nights: four at the old level, and one may be odd.
MAX_MEDIAN_RECOVERY_NIGHTS = 6.0

Nights = NDArray[np.float64]


def _normal(random: np.random.Generator) -> Nights:
    return random.normal(0.0, NOISE, MAX_NIGHTS)


def _heavy_tailed(random: np.random.Generator) -> Nights:
    """Student's t with three degrees of freedom: some nights are far out."""
    return NOISE / math.sqrt(3.0) * random.standard_t(3, MAX_NIGHTS)


def _autocorrelated(random: np.random.Generator) -> Nights:
    """Each night remembers 0.3 of the one before."""
    memory = 0.3
    noise = random.normal(0.0, NOISE * math.sqrt(1 - memory**2), MAX_NIGHTS)
    nights = np.zeros(MAX_NIGHTS)
    for night in range(MAX_NIGHTS):
        nights[night] = memory * nights[night - 1] + noise[night]
    return nights


def _drifting_machine(random: np.random.Generator) -> Nights:
    """The machine becomes slower and faster by itself, which the canary tells, with an error of its own."""
    drift = np.cumsum(random.choice([0.0, 0.0, 0.0, 0.1, -0.1], MAX_NIGHTS))
    work, canary = (random.normal(0.0, NOISE / math.sqrt(2), MAX_NIGHTS) for _ in range(2))
    return np.asarray((drift + work) - (drift + canary))


NOISES: Mapping[str, Callable[[np.random.Generator], Nights]] = {
    "normal": _normal,
    "heavy-tailed": _heavy_tailed,
    "autocorrelated": _autocorrelated,
    "drifting machine": _drifting_machine,
}


@dataclass(frozen=True, kw_only=True)
class FalseAlarms:
    """Alarms in nights where nothing has changed, in 1,000 of them. An alarm that stays is one."""

    noise: str
    num_nights: int
    regressed: float
    suspect: float
    last_night_rule: float

    @property
    def num_regressed(self) -> int:
        return round(self.regressed * self.num_nights / 1000)


@dataclass(frozen=True, kw_only=True)
class Power:
    """Of series with a slowdown from night STEP_NIGHT on, the part in which it was found, and the median number of slow
    nights that took (1: in the first of them); None where none was."""

    noise: str
    slowdown: float
    num_series: int
    found: float
    median_delay_nights: float | None


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Of series whose slowdown was red on the night before FIX_NIGHT and is mended from that on, the part in which the
    alarm ended, and the median number of mended nights that took (1: in the first of them); None where it did not."""

    noise: str
    slowdown: float
    num_series: int
    ended: float
    median_delay_nights: float | None


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    false_alarms: tuple[FalseAlarms, ...]
    powers: tuple[Power, ...]
    recoveries: tuple[Recovery, ...]
    paired: tuple[PairedPower, ...]

    @property
    def num_quiet_nights(self) -> int:
        return sum(rate.num_nights for rate in self.false_alarms)

    @property
    def limits(self) -> str:
        """What must hold of such samples, in a sentence."""
        of_a_kind = max(rate.num_nights for rate in self.false_alarms)
        return (
            f"must hold: at most {most_alarms(of_a_kind)} false alarms in {of_a_kind:,} nights of a kind and "
            f"{most_alarms(self.num_quiet_nights)} in all {self.num_quiet_nights:,} ({FALSE_ALARMS_PER_1000} in 1,000, "
            f"and what chance adds in {CONFIDENCE:.0%} of such samples); slowdowns of {PROVEN_SLOWDOWN:.0%} and more "
            f"are all found, half of them within {MAX_MEDIAN_DELAY_NIGHTS:g} nights, and all let go of, half of them "
            f"within {MAX_MEDIAN_RECOVERY_NIGHTS:g}; in turns, at most {MOST_FALSE:.0%} are called regressed where "
            f"nothing changed, and at least {LEAST_FOUND:.0%} that are slower by {PROVEN_SHIFT:.0%} and more"
        )

    @property
    def failures(self) -> list[str]:
        """What a sound gate would not do, in words."""
        counts = [(rate.noise, rate.num_regressed, rate.num_nights) for rate in self.false_alarms]
        counts.append(("all kinds", sum(rate.num_regressed for rate in self.false_alarms), self.num_quiet_nights))
        loud = [
            f"{noise}: {num_alarms} false alarms in {num_nights:,} nights, expected at most {most_alarms(num_nights)}"
            for noise, num_alarms, num_nights in counts
            if num_alarms > most_alarms(num_nights)
        ]
        deaf = [
            f"{power.noise}: {power.slowdown:.0%} slower was found in {power.found:.0%} of the series, after a median "
            f"of {power.median_delay_nights} nights; expected all, within {MAX_MEDIAN_DELAY_NIGHTS:g}"
            for power in self.powers
            if power.slowdown >= PROVEN_SLOWDOWN
            and (power.found < 1 or (power.median_delay_nights or math.inf) > MAX_MEDIAN_DELAY_NIGHTS)
        ]
        stubborn = [
            f"{recovery.noise}: {recovery.slowdown:.0%} slower and mended was let go of in {recovery.ended:.0%} of the "
            f"series, after a median of {recovery.median_delay_nights} nights; expected all, within "
            f"{MAX_MEDIAN_RECOVERY_NIGHTS:g}"
            for recovery in self.recoveries
            if recovery.ended < 1 or (recovery.median_delay_nights or 0.0) > MAX_MEDIAN_RECOVERY_NIGHTS
        ]
        return loud + deaf + stubborn + paired_failures(self.paired)


def most_alarms(num_nights: int) -> int:
    """As many as a sound gate has in so many nights, or fewer, in CONFIDENCE of all samples."""
    return int(stats.poisson.ppf(CONFIDENCE, FALSE_ALARMS_PER_1000 * num_nights / 1000))


def self_test(*, num_series: int = 10, quiet_series: int = QUIET_SERIES, seed: int = 0) -> SelfTest:
    """Simulates `num_series` series of MAX_NIGHTS nights of each kind, `quiet_series` times as many of those without a
    change; the same seed gives the same answer."""
    random = np.random.default_rng(seed)
    # More of these: they cost little, and alarms are rare.
    quiet = {name: [noise(random) for _ in range(quiet_series * num_series)] for name, noise in NOISES.items()}
    slowed = {
        (name, slowdown): [_slowed(noise(random), slowdown) for _ in range(num_series)]
        for name, noise in NOISES.items()
        for slowdown in SLOWDOWNS
    }
    # Half as many: with both cuts in sight a night takes a second to judge.
    mended = {
        name: [_mended(noise(random), PROVEN_SLOWDOWN) for _ in range(max(1, num_series // 2))]
        for name, noise in NOISES.items()
    }
    return SelfTest(
        false_alarms=tuple(_false_alarms(name, series) for name, series in quiet.items()),
        powers=tuple(_power(name, slowdown, series) for (name, slowdown), series in slowed.items()),
        recoveries=tuple(_recovery(name, PROVEN_SLOWDOWN, series) for name, series in mended.items()),
        paired=paired_powers(num_comparisons=COMPARISONS * num_series, random=random),
    )


def _slowed(nights: Nights, slowdown: float) -> Nights:
    return np.concatenate([nights[:STEP_NIGHT], nights[STEP_NIGHT:] + math.log1p(slowdown)])


def _mended(nights: Nights, slowdown: float) -> Nights:
    return np.concatenate([_slowed(nights, slowdown)[:FIX_NIGHT], nights[FIX_NIGHT:]])


def _false_alarms(noise: str, series: Sequence[Nights]) -> FalseAlarms:
    num_nights, counts = 0, {"regressed": 0, "suspect": 0}
    for nights in series:
        before = ""
        for known in range(MIN_NIGHTS, MAX_NIGHTS + 1):
            verdict = last_night(nights[:known].tolist()).verdict
            num_nights += 1
            if verdict in counts and verdict != before:
                counts[verdict] += 1
            before = verdict
    steps = np.concatenate([np.diff(nights[MIN_NIGHTS - 2 :]) for nights in series])
    return FalseAlarms(
        noise=noise,
        num_nights=num_nights,
        **{verdict: 1000 * count / num_nights for verdict, count in counts.items()},
        last_night_rule=1000 * float(np.mean(steps > math.log1p(LAST_NIGHT_RULE))),
    )


def _power(noise: str, slowdown: float, series: Sequence[Nights]) -> Power:
    delays = [delay for nights in series if (delay := _delay(nights)) is not None]
    return Power(
        noise=noise,
        slowdown=slowdown,
        num_series=len(series),
        found=len(delays) / len(series),
        median_delay_nights=statistics.median(delays) if delays else None,
    )


def _delay(nights: Nights) -> int | None:
    for known in range(STEP_NIGHT + 1, MAX_NIGHTS + 1):
        if last_night(nights[:known].tolist()).verdict == "regressed":
            return known - STEP_NIGHT
    return None


def _recovery(noise: str, slowdown: float, series: Sequence[Nights]) -> Recovery:
    found = [nights for nights in series if last_night(nights[:FIX_NIGHT].tolist()).verdict == "regressed"]
    delays = [delay for nights in found if (delay := _recovery_delay(nights)) is not None]
    return Recovery(
        noise=noise,
        slowdown=slowdown,
        num_series=len(found),
        ended=len(delays) / len(found) if found else 1.0,
        median_delay_nights=statistics.median(delays) if delays else None,
    )


def _recovery_delay(nights: Nights) -> int | None:
    for known in range(FIX_NIGHT + 1, MAX_NIGHTS + 1):
        if last_night(nights[:known].tolist()).verdict != "regressed":
            return known - FIX_NIGHT
    return None
