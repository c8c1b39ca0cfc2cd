"""Explanation: one plain sentence on why a case parts from its reference.

A wrong data-parallel gradient is nearly always another sum of the right shares (one data rank's micro-batch each, see
harness.shares) with other divisors. So every way of summing is tried, the best constant factor in front of it is found
by least squares, and the factor is named as a product of known numbers. A cause is told only where it closes the gap.
Steps count from 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.layout import Layout
from harness.parity import (
    SMALL,
    Difference,
    Tolerance,
    departures,
    describe,
    differences,
    largest_element,
    relative_gradient,
    relative_update,
)
from harness.shares import Share, gradients_by_use, partial_gradients, retrained
from harness.trajectory import Trajectory
from harness.workload import Workload

Gradients = Mapping[str, Tensor]

_CLOSED = 0.25
"""A cause must leave less than this fraction of the gap that it explains."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A known number that a gradient may be off by; `text` completes "it was ..."."""

    text: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """One way to sum shares: `weights` by (data rank, micro-batch). `text` completes "every gradient ...", with
    `unscaled` behind it where the factor is 1; `divisors` are factors that make sense here alone."""

    text: str
    weights: Mapping[tuple[int, int], float]
    unscaled: str = ""
    divisors: tuple[Factor, ...] = ()
    first_rank_only: bool = False

    def of(self, shares: Sequence[Share], names: Sequence[str]) -> dict[str, Tensor]:
        """The gradients of `names` that come out, in fp64; without those that no share uses."""
        mixed: dict[str, Tensor] = {}
        for share in shares:
            weight = self.weights.get((share.data_rank, share.micro_batch), 0.0)
            for name in names:
                if name in share.gradients:
                    part = share.gradients[name].double() * weight
                    mixed[name] = mixed[name] + part if name in mixed else part
        return mixed

    def of_losses(self, shares: Sequence[Share]) -> float:
        return sum(self.weights.get((share.data_rank, share.micro_batch), 0.0) * share.loss_sum for share in shares)


def explain(
    case: Trajectory, reference: Trajectory, tolerance: Tolerance, workload: Workload, layout: Layout
) -> str | None:
    """Where `case` parts first, and which one factor accounts for it; None where it does not part.

    `workload` is the one the reference trained, in the reference's precision; it is replayed here in one process.
    """
    found = differences(case, reference)
    wrong = departures(found, tolerance)
    if not wrong:
        return None
    place = describe(wrong[0], tolerance)
    cause = _Inquiry(case, reference, tolerance, workload, layout, wrong).cause()
    return f"{place}; {cause}" if cause else place


class _Inquiry:
    """One failed comparison with all that the hypotheses need."""

    def __init__(
        self,
        case: Trajectory,
        reference: Trajectory,
        tolerance: Tolerance,
        workload: Workload,
        layout: Layout,
        wrong: Sequence[Difference],
    ) -> None:
        self.case, self.reference, self.tolerance = case, reference, tolerance
        self.workload, self.layout, self.wrong = workload, layout, wrong
        self.weights = reference.starting_parameters
        # How far a least-squares factor may be from the number it is taken for.
        self.factor_tolerance = min(max(4 * tolerance.gradient, 1e-9), 0.03)

    def cause(self) -> str | None:
        first = self.wrong[0]
        here = [d for d in self.wrong if d.step == first.step]
        quantities = {d.quantity for d in here}
        if quantities & {"starting weights", "learning rate", "skipped step"}:
            return None  # the place says it all, and the rest follows from it
        loss_is_right = "loss" not in quantities
        if "gradient" in quantities and (first.step == 0 or loss_is_right):
            return self._gradient_cause(first.step, here, loss_is_right=loss_is_right)
        if not loss_is_right and first.step == 0:
            return self._loss_cause()
        if quantities == {"gradient norm"} and first.step in self.reference.gradients:
            return self._norm_cause(first.step)
        if quantities & {"loss", "gradient", "gradient norm", "parameter"}:
            return self._update_cause()
        return "every loss, gradient and parameter up to there is right" if quantities == {"replicas"} else None

    # Gradients

    def _gradient_cause(self, step: int, here: Sequence[Difference], *, loss_is_right: bool) -> str | None:
        case, right = self.case.gradients.get(step, {}), self.reference.gradients[step]
        gaps = {
            d.name: d.relative for d in here if d.quantity == "gradient" and d.name and math.isfinite(d.relative)
        }
        if not gaps:
            return None
        names = list(gaps)
        if not any(bool(case[name].any()) for name in names):
            return f"{self._subject(names, step, None)} is zero"
        if step == 1 and (stale := self._stale_cause(names, gaps)):
            return stale
        shares = partial_gradients(self.workload, self.layout.data, step, self.weights)
        mixtures = list(_mixtures(shares))
        fits = []
        for mixture in mixtures:
            mixed = mixture.of(shares, names)
            fit = self._fit(case, mixed, names, max(gaps.values()))
            if fit is not None:
                fits.append((mixture, *fit))
        if not fits:
            return self._tie_cause(step, names) or self._no_cause(case, right, names)
        closest = min(residual for *_, residual in fits)
        # The simplest of those that fit equally well.
        mixture, factor, _ = next(fit for fit in fits if fit[2] <= 2 * closest + 1e-15)
        if tie := self._tie_cause(step, names):
            return tie
        if mixture.first_rank_only and not loss_is_right and self._loss_is_first_ranks(shares):
            return f"every rank trains on rank 0's data: its loss and its share of the gradient stand for all ({_num(factor)} x)"
        mixed = {name: factor * value for name, value in mixture.of(shares, list(right)).items()}
        subject = self._subject(names, step, mixed)
        return self._sentence(subject, mixture, factor, shares) + ("" if loss_is_right else "; so is not the loss alone")

    def _fit(
        self, case: Gradients, mixed: Gradients, names: Sequence[str], gap: float
    ) -> tuple[float, float] | None:
        """(factor, residual) of the one factor by which `mixed` comes closest to `case` in `names`, if it closes the
        gap."""
        if any(name not in mixed for name in names):
            return None
        square = sum(float((mixed[name] ** 2).sum()) for name in names)
        if square == 0:
            return None
        factor = sum(float((mixed[name] * case[name].double()).sum()) for name in names) / square
        scaled = {name: factor * mixed[name] for name in names}
        yardstick = largest_element(scaled)
        residual = max(relative_gradient(case[name], scaled[name], yardstick) for name in names)
        return (factor, residual) if residual <= min(2 * self.tolerance.gradient, _CLOSED * gap) else None

    def _subject(self, names: Sequence[str], step: int, hypothesis: Gradients | None) -> str:
        """Whose gradient it is. "Every" one, if no other parameter could have told the hypothesis from the truth."""
        right = self.reference.gradients[step]
        others = [name for name in right if name not in names]
        if hypothesis is not None:
            yardstick = largest_element(right)
            others = [
                name
                for name in others
                if name not in hypothesis
                or relative_gradient(hypothesis[name], right[name], yardstick) > 2 * self.tolerance.gradient
            ]
        if not others:
            return "every gradient"
        return f"the gradient of {_quoted(names)} ({len(names)} of {len(right)} parameters; the others are right)"

    def _sentence(self, subject: str, mixture: Mixture, factor: float, shares: Sequence[Share]) -> str:
        is_one = abs(factor - 1) <= self.factor_tolerance
        if is_one and mixture.text:
            return f"{subject} {mixture.text}{mixture.unscaled}"
        names = _name_factor(factor, (*_factors(shares, self.layout), *mixture.divisors), self.factor_tolerance)
        known = " or ".join(names) or "no product of the degrees, micro-batches and token counts gives that"
        if mixture.text:
            return f"{subject} {mixture.text}, {_num(factor)} x: {known}"
        return f"{subject} is {_num(factor)} x the right one: {known}"
