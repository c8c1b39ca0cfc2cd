"""Parity: does a case still train the same model as one process does? Its differences against what is allowed.

fp64 proves the algorithm; fp32 is judged in units of the reference's own noise; bf16 by an envelope from several seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from harness.differences import Difference, Quantity, differences, largest
from harness.result import Parity
from harness.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a case may be from its reference, relative, by quantity; what is not listed must be equal.

    Buffers are judged as gradients are: both are sums over a batch. `first_step` holds for what the first step shows:
    no update has made anything of its rounding errors yet.
    """

    lane: str
    loss: float
    gradient_norm: float
    gradient: float
    parameter: float
    starting_weights: float = 0.0
    first_step: Tolerance | None = None

    def allowed(self, quantity: Quantity, step: int) -> float:
        """Of a quantity at one step, which counts from 0. Parameters and buffers have seen updates at whichever."""
        if step == 0 and self.first_step is not None and quantity in _SHOWN_BY_A_STEP:
            return self.first_step.allowed(quantity, step)
        return {
            "loss": self.loss,
            "evaluation loss": self.loss,
            "gradient norm": self.gradient_norm,
            "gradient": self.gradient,
            "buffer": self.gradient,
            "parameter": self.parameter,
            "starting weights": self.starting_weights,
        }.get(quantity, 0.0)

    def forbids(self, difference: Difference) -> bool:
        return not difference.relative <= self.allowed(difference.quantity, difference.step)

    def excess(self, difference: Difference) -> float:
        """The difference in units of what is allowed."""
        if difference.relative == 0:
            return 0.0
        allowed = self.allowed(difference.quantity, difference.step)
        return difference.relative / allowed if allowed else math.inf

    @classmethod
    def exact(cls) -> Tolerance:
        """The fp64 lane: the algorithm itself, up to the order of additions."""
        return cls(lane="fp64", loss=1e-12, gradient_norm=1e-12, gradient=1e-12, parameter=1e-12)

    @classmethod
    def from_noise(cls, reference: Trajectory, *others: Trajectory, factor: float = 8.0) -> Tolerance:
        """The fp32 lane: `factor` times the reference's largest distance from itself with another micro-batch split and
        another number of threads, and from weights that are rounded otherwise (`others`), within fixed bounds: a
        reference that repeats itself bit for bit still leaves room for another order of additions, and no noise hides
        0.1 % of the whole gradient or 1 % of one parameter's. A model that holds half-precision parameters of its own
        gets the wider bounds of bf16."""
        noise = [d for other in others for d in differences(other, reference)]
        if any(g.dtype.itemsize < 4 for gradients in reference.gradients.values() for g in gradients.values()):
            return replace(_bounded(noise, factor, _BF16_LEAST, _BF16_MOST), lane="fp32", starting_weights=0.0)
        # AdamW makes whole updates of rounding errors where a gradient is nearly zero: what later steps may differ by
        # would hide much at the first one.
        first = _bounded([d for d in noise if d.step == 0], factor, _FP32_LEAST, _FP32_MOST)
        return replace(_bounded(noise, factor, _FP32_LEAST, _FP32_MOST), first_step=first)

    @classmethod
    def from_seeds(cls, pairs: Sequence[tuple[Trajectory, Trajectory]], factor: float = 3.0) -> Tolerance:
        """The bf16 lane: `factor` times the largest distance, over several seeds, of a single bf16 process from a
        single fp32 process, as (bf16, fp32) pairs. A bf16 case is then held against the *fp32* reference: it may be
        as far from the truth as one bf16 process is, which no choice of one bf16 run's rounding enters."""
        noise = [d for low, high in pairs for d in differences(low, high)]
        return _bounded(noise, factor, _BF16_LEAST, _BF16_MOST)


_SHOWN_BY_A_STEP: frozenset[Quantity] = frozenset({"loss", "gradient norm", "gradient"})

# 16 epsilons for sums over everything, 512 for single elements.
_FP32_LEAST = Tolerance(lane="fp32", loss=2e-6, gradient_norm=2e-6, gradient=6e-5, parameter=3e-5)
_FP32_MOST = Tolerance(lane="fp32", loss=1e-4, gradient_norm=5e-4, gradient=5e-3, parameter=5e-3)
# One element of a norm's 16 whose update changes sign is 0.125 of the update.
_BF16_LEAST = Tolerance(
    lane="bf16", loss=5e-4, gradient_norm=4e-3, gradient=0.06, parameter=0.2, starting_weights=2**-8
)
# Below one half, which is how far a gradient divided twice is from the right one.
_BF16_MOST = Tolerance(lane="bf16", loss=1e-2, gradient_norm=0.1, gradient=0.45, parameter=0.45, starting_weights=2**-8)


def compare(case: Trajectory, reference: Trajectory, tolerance: Tolerance) -> Parity:
    """`case` held against `reference`. ValueError if they ran different numbers of steps.

    `first_bad_step` counts from 0; parameters and buffers belong to the last step. `worst_parameter` is the one
    farthest beyond, or nearest to, what is allowed. Where something is wrong, `explanation` says where.
    """
    found = differences(case, reference)
    wrong = departures(found, tolerance)
    named = [d for d in found if d.name is not None]
    worst = max(named, key=tolerance.excess, default=None)
    return Parity(
        ok=not wrong,
        lane=tolerance.lane,
        loss_max_relative=largest(found, "loss"),
        evaluation_loss_relative=None if case.evaluation_loss is None else largest(found, "evaluation loss"),
        gradient_norm_max_relative=largest(found, "gradient norm"),
        gradient_max_relative=largest(found, "gradient"),
        parameter_max_relative=largest(found, "parameter"),
        worst_parameter=None if worst is None else worst.name,
        first_bad_step=wrong[0].step if wrong else None,
        explanation=describe(wrong[0], tolerance) if wrong else None,
        replicas_bit_equal=not any(d.quantity == "replicas" for d in wrong),
        tolerance=_as_told(tolerance),
    )


def _as_told(tolerance: Tolerance) -> dict[str, float]:
    told = {f.name: getattr(tolerance, f.name) for f in fields(tolerance) if f.name not in ("lane", "first_step")}
    first = tolerance.first_step
    return told if first is None else {**told, "first_loss": first.loss, "first_gradient": first.gradient}


def departures(found: Iterable[Difference], tolerance: Tolerance) -> list[Difference]:
    """The differences that are not allowed: the first step in front, and there the largest excess; replicas come after
    the numbers they hold."""
    wrong = [difference for difference in found if tolerance.forbids(difference)]
    return sorted(wrong, key=lambda d: (d.step, d.quantity == "replicas", d.reason is None, -tolerance.excess(d)))


def describe(difference: Difference, tolerance: Tolerance) -> str:
    """Where it parts and by how much."""
    if difference.reason is not None:
        return f"parts at step {difference.step}: {difference}"
    allowed = tolerance.allowed(difference.quantity, difference.step)
    return (
        f"parts at step {difference.step}, worst in {difference} "
        f"(relative difference {difference.relative:.3g}, allowed {allowed:.3g})"
    )


def _bounded(noise: Sequence[Difference], factor: float, least: Tolerance, most: Tolerance) -> Tolerance:
    if not noise:
        raise ValueError("tolerance: expected at least one pair of trajectories to measure the noise with, got none")
    # Another split of the batch calls the model another number of times, which buffers may count.
    for difference in (d for d in noise if d.quantity != "buffer"):
        if math.isinf(difference.relative):
            raise ValueError(f"tolerance: the reference disagrees with itself at step {difference.step}: {difference}")

    def bounded(quantity: Quantity) -> float:
        return min(max(factor * largest(noise, quantity), least.allowed(quantity, 0)), most.allowed(quantity, 0))

    return Tolerance(
        lane=least.lane,
        loss=bounded("loss"),
        gradient_norm=bounded("gradient norm"),
        gradient=bounded("gradient"),
        parameter=bounded("parameter"),
        starting_weights=least.starting_weights,
    )
