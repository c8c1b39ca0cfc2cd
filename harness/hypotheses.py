"""Hypotheses: the ways in which the shares of a step are summed wrongly, and the numbers a gradient is off by.

share g[r][m]    micro-batch m = 0    m = 1
data rank r = 0      g00, c00        g01, c01       right: (g00 + g01 + g10 + g11) / (c00 + c01 + c10 + c11)
         r = 1      g10, c10        g11, c11       mean of means over ranks:
                                                    ((g00 + g01) / (c00 + c01) + (g10 + g11) / (c10 + c11)) / 2
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from harness.layout import Layout
from harness.shares import Share

_Key = tuple[int, int]  # (data rank, micro-batch)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A known number that something may be off by, and what happened if it is."""

    text: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """One way to sum shares. `text` completes "every gradient ..." and is empty for the right way; `own_factors` are
    those that make sense for this one, before all others."""

    text: str
    weights: Mapping[_Key, float]
    own_factors: tuple[Factor, ...] = ()

    def gradients(self, shares: Sequence[Share], names: Sequence[str]) -> dict[str, Tensor]:
        """What becomes of the gradients of `names`, in fp64; without those that no share uses."""
        mixed: dict[str, Tensor] = {}
        for share in shares:
            weight = self.weights.get((share.data_rank, share.micro_batch), 0.0)
            for name in names:
                if name in share.gradients:
                    part = share.gradients[name].double() * weight
                    mixed[name] = mixed[name] + part if name in mixed else part
        return mixed

    def loss(self, shares: Sequence[Share]) -> float:
        return sum(self.weights.get((share.data_rank, share.micro_batch), 0.0) * share.loss_sum for share in shares)


def mixtures(shares: Sequence[Share], unit: str = "token") -> list[Mixture]:
    """The right one, then the wrong ones, without those that only differ from an earlier one by a factor: with equal
    counts a mean of means is right."""
    found: list[Mixture] = []
    for mixture in _all_mixtures(shares, unit):
        if not any(_proportional(mixture.weights, other.weights) for other in found):
            found.append(mixture)
    return found


def factors(shares: Sequence[Share], layout: Layout, unit: str = "token") -> tuple[list[Factor], list[Factor]]:
    """(what may be applied to a right gradient in any combination, what may replace its divisor)."""
    num_micro_batches = 1 + max(share.micro_batch for share in shares)
    degrees = [
        factor
        for name, value in (
            ("the data degree", layout.data),
            ("the number of micro-batches", num_micro_batches),
            ("the tensor degree", layout.tensor),
            ("the pipeline degree", layout.pipeline),
        )
        if value > 1
        for factor in (
            Factor(text=f"multiplied by {name} ({value})", value=value),
            Factor(text=f"divided once more by {name} ({value})", value=1 / value),
        )
    ]
    count = sum(share.num_tokens for share in shares)
    num_targets, num_samples = (sum(s.num_targets for s in shares), sum(s.num_samples for s in shares))
    divisors = [
        Factor(text=f"never divided by the global {unit} count ({count})", value=count),
        Factor(text=f"divided twice by the global {unit} count ({count})", value=1 / count),
        Factor(text=f"divided by all {num_targets} targets, ignored ones too", value=count / num_targets),
        Factor(text=f"divided by the number of samples ({num_samples})", value=count / num_samples),
    ]
    return degrees, [divisor for divisor in divisors if divisor.value != 1]


def name_factor(value: float, degrees: Sequence[Factor], divisors: Sequence[Factor], tolerance: float) -> list[str]:
    """The shortest products of at most two known numbers that give `value`; several if they coincide."""
    singles = [*degrees, *divisors]
    pairs = [
        Factor(text=f"{second.text} and {first.text}", value=first.value * second.value)
        for first, second in itertools.combinations(singles, 2)
        if first in degrees
    ]
    for candidates in (singles, pairs):
        if texts := [c.text for c in candidates if math.isclose(c.value, value, rel_tol=tolerance)]:
            return list(dict.fromkeys(texts))
    return []


def _all_mixtures(shares: Sequence[Share], unit: str) -> Iterator[Mixture]:
    counts = {(share.data_rank, share.micro_batch): share.num_tokens for share in shares}
    counted = {key: count for key, count in counts.items() if count}
    total = sum(counts.values())
    ranks, micro_batches = (sorted({key[axis] for key in counts}) for axis in (0, 1))
    of_rank = {rank: sum(c for key, c in counts.items() if key[0] == rank) for rank in ranks}
    of_micro_batch = {index: sum(c for key, c in counts.items() if key[1] == index) for index in micro_batches}
    of_first = {key: count for key, count in counted.items() if key[0] == 0}

    def only(*keys: _Key) -> dict[_Key, float]:
        return {key: 1 / total for key in keys if key in counted}

    yield Mixture(text="", weights=only(*counted))
    if of_first:
        yield Mixture(
            text="holds rank 0's share alone",
            weights=only(*of_first),
            own_factors=(
                Factor(
                    text=f"not reduced, divided by rank 0's own {unit} count ({of_rank[0]})", value=total / of_rank[0]
                ),
                Factor(text=f"not reduced, divided by the global {unit} count ({total})", value=1.0),
                Factor(text=f"counted {len(ranks)} times, as with identical data on every rank", value=len(ranks)),
            ),
        )
    right_divisor = (Factor(text=f"divided by the global {unit} count ({total})", value=1.0),)
    yield Mixture(
        text="is a mean of means over the data ranks",
        weights={key: 1 / (len(ranks) * of_rank[key[0]]) for key in counted},
        own_factors=(
            Factor(text=f"each divided by its own {unit} count ({_listed(of_rank)}), then averaged", value=1.0),
        ),
    )
    yield Mixture(
        text="is a mean of means over the micro-batches",
        weights={key: 1 / (len(micro_batches) * of_micro_batch[key[1]]) for key in counted},
        own_factors=(
            Factor(text=f"each divided by its own {unit} count ({_listed(of_micro_batch)}), then averaged", value=1.0),
        ),
    )
    yield Mixture(
        text="is a mean of means over data ranks and micro-batches",
        weights={key: 1 / (len(counts) * count) for key, count in counted.items()},
        own_factors=(Factor(text=f"each divided by its own {unit} count, then averaged", value=1.0),),
    )
    if of_first:
        yield Mixture(
            text="holds rank 0's share alone, a mean of means over its micro-batches",
            weights={key: 1 / (len(micro_batches) * count) for key, count in of_first.items()},
            own_factors=(Factor(text="not reduced", value=1.0),),
        )
    for index in dict.fromkeys((micro_batches[-1], micro_batches[0])):
        which = "last" if index == micro_batches[-1] else "first"
        own = of_micro_batch[index]
        if own:
            yield Mixture(
                text=f"holds the {which} micro-batch alone",
                weights=only(*(key for key in counted if key[1] == index)),
                own_factors=(
                    *right_divisor,
                    Factor(text=f"divided by its own {unit} count ({own})", value=total / own),
                ),
            )
    for index in micro_batches:
        yield Mixture(
            text=f"lacks micro-batch {index}",
            weights=only(*(key for key in counted if key[1] != index)),
            own_factors=right_divisor,
        )
    for rank in ranks:
        yield Mixture(
            text=f"lacks data rank {rank}'s share",
            weights=only(*(key for key in counted if key[0] != rank)),
            own_factors=right_divisor,
        )


def _proportional(one: Mapping[_Key, float], other: Mapping[_Key, float]) -> bool:
    """Equal up to a factor; sums of nothing are proportional to everything."""
    if not one:
        return True
    if one.keys() != other.keys():
        return False
    ratios = [one[key] / other[key] for key in one]
    return math.isclose(min(ratios), max(ratios), rel_tol=1e-12)


def _listed(counts: Mapping[int, int]) -> str:
    return ", ".join(map(str, counts.values()))
