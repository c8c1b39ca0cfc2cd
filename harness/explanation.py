"""Explanation: one plain sentence on why a case parts from its reference.

A wrong data-parallel gradient is nearly always another sum of the right shares with another divisor. So every way of
summing (harness.hypotheses) is tried, the best constant factor in front of it is found by least squares, and that
factor is named as a product of known numbers. A cause is told only where it closes the gap. Steps count from 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.differences import (
    Difference,
    differences,
    largest_element,
    noisy_elements,
    relative_gradient,
    relative_update,
)
from harness.hypotheses import Factor, Mixture, factors, mixtures, name_factor
from harness.layout import Layout
from harness.parity import Tolerance, departures, describe
from harness.shares import Share, gradients_by_use, partial_gradients, retrained
from harness.trajectory import Trajectory
from harness.unreduced import whose_shares
from harness.workload import Workload

Gradients = Mapping[str, Tensor]

_CLOSED = 0.25
"""A cause leaves less than this fraction of the gap that it explains."""
_MOST_NAMES = 4
_USUAL_CLIP_NORM = 1.0  # what libraries clip at that are told nothing


def explain(
    case: Trajectory, reference: Trajectory, tolerance: Tolerance, workload: Workload, layout: Layout
) -> str | None:
    """Where `case` parts first, and which one factor accounts for it; None where it does not part.

    `workload` is the one the reference trained, in the reference's precision: it is replayed here, in this process.
    """
    wrong = departures(differences(case, reference), tolerance)
    if not wrong:
        return None
    inquiry = _Inquiry(
        case=case, reference=reference, tolerance=tolerance, workload=workload, layout=layout, wrong=tuple(wrong)
    )
    return "; ".join(filter(None, (describe(wrong[0], tolerance), _cause(inquiry))))


@dataclass(frozen=True, kw_only=True)
class _Inquiry:
    """A failed comparison with all that a hypothesis is tested on."""

    case: Trajectory
    reference: Trajectory
    tolerance: Tolerance
    workload: Workload
    layout: Layout
    wrong: tuple[Difference, ...]

    @property
    def unit(self) -> str:
        return self.workload.unit.removesuffix("s")

    @property
    def factor_tolerance(self) -> float:
        """How far a fitted factor may be from the number it is taken for."""
        return min(max(4 * self.tolerance.gradient, 1e-9), 0.03)

    def shares(self, step: int) -> tuple[Share, ...]:
        return partial_gradients(self.workload, self.layout.data, step, self.reference.starting_parameters)

    def closes(self, residual: float, gap: float, allowed: float) -> bool:
        return residual <= min(2 * allowed, _CLOSED * gap)


def _cause(inquiry: _Inquiry) -> str | None:
    step = inquiry.wrong[0].step
    here = [difference for difference in inquiry.wrong if difference.step == step]
    quantities = {difference.quantity for difference in here}
    if quantities & {"starting weights", "learning rate", "skipped step"}:
        return None  # the place says it all; the rest follows from it
    if {difference.quantity for difference in inquiry.wrong} == {"replicas"}:
        return "losses, gradients and parameters are right"
    if "gradient" in quantities and (step == 0 or "loss" not in quantities):
        causes = [_gradient_cause(inquiry, step, here)]
        if "loss" in quantities:
            causes.append(_loss_cause(inquiry))
        causes += [str(difference) for difference in here if difference.quantity == "replicas"]
        return "; ".join(filter(None, causes)) or None
    if "loss" in quantities and step == 0:
        return _loss_cause(inquiry)
    if quantities == {"gradient norm"}:
        return _norm_cause(inquiry, step)
    if quantities & {"loss", "gradient", "gradient norm", "parameter"}:
        return _update_cause(inquiry)
    return None


# Gradients


def _gradient_cause(inquiry: _Inquiry, step: int, here: Sequence[Difference]) -> str | None:
    case = inquiry.case.gradients.get(step, {})
    right = inquiry.reference.gradients[step]
    gaps = {d.name: d.relative for d in here if d.quantity == "gradient" and d.name is not None}
    names = [name for name in right if math.isfinite(gaps.get(name, math.inf))]
    if not names:
        return None
    gap = max(gaps[name] for name in names)
    if not any(bool(case[name].any()) for name in names):
        return f"{_subject(inquiry, step, names, None)} is zero"
    if step == 1 and (stale := _stale_cause(inquiry, names, gap)):
        return stale
    shares = inquiry.shares(step)
    fits = [
        (mixture, *fit)
        for mixture in mixtures(shares, inquiry.unit)
        if (fit := _fit(inquiry, case, mixture.gradients(shares, names), names, gap))
        # The right gradients once are what the case is off by a little, and no cause.
        and (mixture.text or not math.isclose(fit[0], 1, rel_tol=inquiry.factor_tolerance))
    ]
    if fits:
        # The first of those that fit about equally well: in bf16 several may.
        closest = min(residual for *_, residual in fits)
        mixture, factor, _ = next(fit for fit in fits if fit[2] <= 2 * closest + 1e-14)
        would_be = {name: factor * value for name, value in mixture.gradients(shares, list(right)).items()}
        return _sentence(inquiry, _subject(inquiry, step, names, would_be), mixture, factor, shares)
    if step == 0 and (tie := _tie_cause(inquiry, names, gaps)):
        return tie
    if not_reduced := _unreduced_cause(inquiry, step, names, gaps):
        return not_reduced
    ratios = [_ratio(case[name], right[name]) for name in names]
    if all(math.isclose(ratio, 1, rel_tol=inquiry.factor_tolerance) for ratio in ratios):
        return f"no single factor explains it: the gradients of {_some(names)} are right but for single elements"
    return f"no single factor explains it: the gradients of {_some(names)} are {_range(ratios)} x the right ones"


def _fit(
    inquiry: _Inquiry, case: Gradients, mixed: Gradients, names: Sequence[str], gap: float
) -> tuple[float, float] | None:
    """(factor, residual) of the factor by which `mixed` comes closest to `case`, if that closes the gap."""
    if any(name not in mixed for name in names):
        return None
    square = sum(float(mixed[name].square().sum()) for name in names)
    if square == 0:
        return None
    factor = sum(float((mixed[name] * case[name].double()).sum()) for name in names) / square
    scaled = {name: factor * mixed[name] for name in names}
    yardstick = largest_element(scaled)
    residual = max(relative_gradient(case[name], scaled[name], yardstick) for name in names)
    return (factor, residual) if inquiry.closes(residual, gap, inquiry.tolerance.gradient) else None


def _sentence(inquiry: _Inquiry, subject: str, mixture: Mixture, factor: float, shares: Sequence[Share]) -> str:
    near = inquiry.factor_tolerance
    for own in mixture.own_factors:
        if math.isclose(own.value, factor, rel_tol=near):
            return f"{subject} {mixture.text}: {own.text}"
    names = name_factor(factor, *factors(shares, inquiry.layout, inquiry.unit), near)
    known = " or ".join(names) or "no product of the degrees, micro-batches and counts gives that"
    if not mixture.text:
        return f"{subject} is {factor:.6g} x the right one: {known}"
    return f"{subject} {mixture.text}, {factor:.6g} x: {known}"


def _subject(inquiry: _Inquiry, step: int, names: Sequence[str], would_be: Gradients | None) -> str:
    """Whose gradient it is: every one's, if the right ones would look the same under the hypothesis."""
    right = inquiry.reference.gradients[step]
    others = [name for name in right if name not in names]
    if would_be is not None:
        yardstick = largest_element(right)
        others = [
            name
            for name in others
            if name in would_be
            and relative_gradient(would_be[name], right[name], yardstick) > 2 * inquiry.tolerance.gradient
        ]
    if not others:
        return "every gradient"
    return f"the gradient of {_some(names)} ({len(names)} of {len(right)} parameters, the others are right)"


def _stale_cause(inquiry: _Inquiry, names: Sequence[str], gap: float) -> str | None:
    """Step 1's gradient against step 0's."""
    case, right, before = inquiry.case.gradients[1], inquiry.reference.gradients[1], inquiry.reference.gradients[0]
    if any(name not in before for name in names):
        return None
    yardstick = largest_element(right)

    def is_explained(would_be: Gradients) -> bool:
        residual = max(relative_gradient(case[name], would_be[name], yardstick) for name in names)
        return inquiry.closes(residual, gap, inquiry.tolerance.gradient)

    if is_explained(before):
        return f"{_subject(inquiry, 1, names, before)} of step 1 is step 0's: a stale buffer"
    square = sum(float(before[name].double().square().sum()) for name in names)
    extra = {name: case[name].double() - right[name].double() for name in names}
    part = sum(float((extra[name] * before[name].double()).sum()) for name in names) / square if square else 0.0
    both = {name: right[name].double() + part * before[name].double() for name in right if name in before}
    if not is_explained(both):
        return None
    much = "" if math.isclose(part, 1, rel_tol=inquiry.factor_tolerance) else f"{part:.6g} x "
    return f"{_subject(inquiry, 1, names, both)} of step 1 holds {much}step 0's too: a buffer was not cleared"


def _unreduced_cause(inquiry: _Inquiry, step: int, names: Sequence[str], gaps: Mapping[str, float]) -> str | None:
    """Whether the gradients are put together from single ranks' own shares."""
    case = inquiry.case.gradients[step]

    def is_explained(name: str, would_be: Tensor) -> bool:
        residual = relative_gradient(case[name], would_be, 0.0)
        return inquiry.closes(residual, gaps[name], inquiry.tolerance.gradient)

    known = whose_shares({name: case[name] for name in names}, inquiry.shares(step), is_explained, inquiry.unit)
    if known is None:
        return None
    when = f", though step {step - 1}'s was" if step else ""
    return f"{_subject(inquiry, step, names, None)} {known}: not reduced{when}"


def _tie_cause(inquiry: _Inquiry, names: Sequence[str], gaps: Mapping[str, float]) -> str | None:
    uses = gradients_by_use(inquiry.workload, inquiry.layout.data, inquiry.reference.starting_parameters)
    if not uses or any(name not in uses for name in names):
        return None
    held = []
    for name in names:
        got = inquiry.case.gradients[0][name]
        for use, gradient in uses[name].items():
            if inquiry.closes(relative_gradient(got, gradient, 0.0), gaps[name], inquiry.tolerance.gradient):
                held.append(f"the gradient of the tied parameter {name!r} holds only its use as {use!r}")
                break
        else:
            return None
    return "; ".join(held)


# Losses and norms


def _loss_cause(inquiry: _Inquiry) -> str | None:
    shares, loss = inquiry.shares(0), inquiry.case.losses[0]
    near = max(4 * inquiry.tolerance.loss, 1e-9)
    for mixture in mixtures(shares, inquiry.unit):
        mixed = mixture.loss(shares)
        if not mixed:
            continue
        factor = loss / mixed
        for own in mixture.own_factors:
            if math.isclose(own.value, factor, rel_tol=near):
                return f"the loss {mixture.text}: {own.text.removeprefix('not reduced, ')}"
        if not mixture.text and (names := name_factor(factor, *factors(shares, inquiry.layout, inquiry.unit), near)):
            return f"the loss is {factor:.6g} x the right one: {' or '.join(names)}"
    return f"the loss is {loss:.6g}, not {inquiry.reference.losses[0]:.6g}, which no single factor explains"


def _norm_cause(inquiry: _Inquiry, step: int) -> str:
    norm, right = inquiry.case.gradient_norms[step], inquiry.reference.gradient_norms[step]
    if norm is None or not right:
        return "the gradients are right"
    near = max(4 * inquiry.tolerance.gradient_norm, 1e-9)
    ratio = norm / right
    clip = inquiry.workload.training.clip_norm
    # clip / (norm + 1e-6) is how torch clips
    if clip is not None and right > clip and math.isclose(norm, clip, rel_tol=max(near, 2e-6 / right)):
        return f"the gradients are right, their norm was taken after clipping ({clip:g})"
    axes = (("data", inquiry.layout.data), ("tensor", inquiry.layout.tensor), ("pipeline", inquiry.layout.pipeline))
    for name, degree in axes:
        if degree > 1 and math.isclose(ratio**2, degree, rel_tol=near):
            return (
                f"the gradients are right, their squares were summed once for each rank of the {name} axis ({degree})"
            )
    degrees = [
        Factor(text=text.format(f"the {name} degree ({degree})"), value=value)
        for name, degree in axes
        if degree > 1
        for text, value in (("multiplied by {}", degree), ("divided by {}", 1 / degree))
    ]
    known = " or ".join(name_factor(ratio, degrees, (), near)) or "no single factor explains it"
    return f"the gradients are right, their norm is {ratio:.6g} x the right one: {known}"


# Updates


def _update_cause(inquiry: _Inquiry) -> str:
    case, reference = inquiry.case, inquiry.reference
    gaps = {
        d.name: d.relative
        for d in inquiry.wrong
        if d.quantity == "parameter" and d.name is not None and math.isfinite(d.relative)
    }
    if not gaps:
        return "no single factor explains it: the gradients of the first steps and the parameters are right"
    if unmoved := [name for name in gaps if torch.equal(case.parameters[name], case.starting_parameters[name])]:
        rest = "" if len(unmoved) == len(gaps) else f", and {len(gaps) - len(unmoved)} others are wrong too"
        return f"the gradients are right, but {_some(unmoved)} never moved from the starting weights{rest}"
    noisy = noisy_elements(case, reference)
    for text, changed in _recipes(inquiry.workload, inquiry.layout):
        would_be = retrained(changed, inquiry.layout.data, reference.num_steps, reference.starting_parameters)
        residual = max(
            relative_update(
                case.parameters[name],
                would_be[name],
                case.starting_parameters[name],
                reference.starting_parameters[name],
                noisy.get(name),
            )
            for name in gaps
        )
        if inquiry.closes(residual, max(gaps.values()), inquiry.tolerance.parameter):
            return f"the gradients are right, the update is not: {text}"
    ratios = [
        _ratio(
            case.parameters[name].double() - case.starting_parameters[name].double(),
            reference.parameters[name].double() - reference.starting_parameters[name].double(),
        )
        for name in gaps
    ]
    return (
        f"the gradients are right, the update is not: no single change of the recipe explains it; "
        f"the updates of {_some(list(gaps))} are {_range(ratios)} x the right ones"
    )


def _recipes(workload: Workload, layout: Layout) -> Iterator[tuple[str, Workload]]:
    """The usual slips in a recipe, each as a workload that makes it."""
    recipe = workload.training

    def changed(**values: object) -> Workload:
        return replace(workload, training=replace(recipe, **values))  # type: ignore[arg-type]

    if recipe.weight_decay:
        yield f"weight decay ({recipe.weight_decay:g}) is missing", changed(weight_decay=0.0)
        yield "weight decay is applied to every parameter", replace(workload, decays=lambda name, parameter: True)
    if recipe.clip_norm is not None:
        yield f"gradients are not clipped ({recipe.clip_norm:g})", changed(clip_norm=None)
    if recipe.clip_norm != _USUAL_CLIP_NORM:
        yield f"gradients are clipped at {_USUAL_CLIP_NORM:g}", changed(clip_norm=_USUAL_CLIP_NORM)
    if recipe.optimizer == "sgd" and recipe.momentum:
        yield f"momentum ({recipe.momentum:g}) is missing", changed(momentum=0.0)
    if recipe.schedule != "constant" or recipe.warmup_steps:
        yield "the learning-rate schedule is missing", changed(schedule="constant", warmup_steps=0)
    if recipe.learning_rate_scaling != "none":
        yield "the learning rate is not scaled with the global batch", changed(learning_rate_scaling="none")
    scales = (("data degree", layout.data), ("number of micro-batches", recipe.num_micro_batches))
    for (name, degree), (operation, power) in itertools.product(scales, (("multiplied", 1), ("divided", -1))):
        if degree > 1:
            text = f"the learning rate is {operation} by the {name} ({degree})"
            yield text, changed(learning_rate=recipe.learning_rate * degree**power)


def _ratio(got: Tensor, right: Tensor) -> float:
    """The factor of the least squares; NaN where there is nothing to divide by."""
    square = float(right.double().square().sum())
    return float((got.double() * right.double()).sum()) / square if square else math.nan


def _range(ratios: Sequence[float]) -> str:
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return f"between {min(known):.4g} and {max(known):.4g}" if known else "an unknown number"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
