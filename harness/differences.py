"""Differences: every quantity of one trajectory against another's, as a number that is 0 where they are equal.

[Note: What is compared with what]
A gradient differs by the largest difference of any element, as a fraction of the parameter's largest gradient, but of
at least SMALL times the largest gradient of the model. The floor is there because rounding errors are as large as the
terms that were summed, not as the sum: a key bias of attention has gradient 0 and shows 1e-17 of the largest gradient
in fp64, 4e-8 in fp32, 2e-5 in bf16 (measured on a GPT); without a floor that noise would count as a difference of 1.

Parameters differ by the *mean* difference over the *mean* update since the starting weights. AdamW divides a gradient
by its own size, so where a gradient happens to be near zero its rounding error becomes an update of full size. Such
elements are few: on a GPT of 0.9M parameters, fp32, four steps, the largest difference is 6e-3 of the update and says
nothing, the root mean square 4e-5, the mean 2e-6 (in fp64 2e-11, 1e-13, 8e-15). A mean still sees one element that was
never stepped, at 1/N. Elements whose gradient is nothing but rounding noise (below NOISE epsilons of the largest), as
in a key bias or in the key's third of a fused bias, are left out of it: AdamW makes updates of noise out of them. Their
gradient is judged, their update only by its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from harness.trajectory import Trajectory

Quantity = Literal[
    "starting weights",
    "learning rate",
    "skipped step",
    "loss",
    "evaluation loss",
    "gradient",
    "gradient norm",
    "parameter",
    "buffer",
    "replicas",
]

SMALL = 1e-3
"""A tensor smaller than this fraction of its yardstick is judged relative to the yardstick; see the note above."""
NOISE = 64
"""A gradient below this many epsilons of the model's largest is rounding noise (measured: less than one epsilon)."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One quantity against the reference. `reason` says what is wrong where no number can."""

    step: int
    quantity: Quantity
    name: str | None = None
    relative: float
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return self.reason
        return f"the {self.quantity} of {self.name!r}" if self.name is not None else f"the {self.quantity}"


def largest(found: Iterable[Difference], quantity: Quantity) -> float:
    """The largest relative difference of one quantity; infinite where something cannot be compared."""
    return max((d.relative for d in found if d.quantity == quantity), default=0.0)


def differences(case: Trajectory, reference: Trajectory) -> list[Difference]:
    """Every quantity of `case` against `reference`. ValueError if they ran different numbers of steps."""
    if case.num_steps != reference.num_steps:
        raise ValueError(
            f"parity: expected the reference's number of steps ({reference.num_steps}), got {case.num_steps}"
        )
    last = reference.num_steps - 1
    return [
        *_starting_weights(case, reference),
        *(difference for step in range(reference.num_steps) for difference in _scalars(case, reference, step)),
        *(difference for step in sorted(reference.gradients) for difference in _gradients(case, reference, step)),
        *_evaluation(case, reference, last),
        *_parameters(case, reference, last),
        *_buffers(case, reference, last),
        *_replicas(case),
    ]


def relative_gradient(got: Tensor, right: Tensor, yardstick: float) -> float:
    """See [Note: What is compared with what]; `yardstick` is the model's largest gradient."""
    return _ratio(_peak(got.double() - right.double()), max(_peak(right), SMALL * yardstick))


def largest_element(tensors: Mapping[str, Tensor]) -> float:
    return max((_peak(tensor) for tensor in tensors.values()), default=0.0)


def relative_update(
    got: Tensor, right: Tensor, got_start: Tensor, right_start: Tensor, noise: Tensor | None = None
) -> float:
    """See [Note: What is compared with what]; the elements in `noise` are left out. A tiny update is judged as a
    fraction SMALL of the weights, in which it is stored."""
    got_update, right_update = got.double() - got_start.double(), right.double() - right_start.double()
    if noise is not None:
        got_update, right_update, right = got_update[~noise], right_update[~noise], right[~noise]
    scale = max(_mean(right_update), SMALL * _mean(right))
    return _ratio(_mean(got_update - right_update), scale)


def noisy_elements(case: Trajectory, reference: Trajectory) -> dict[str, Tensor]:
    """Where the reference's gradient is rounding noise at every recorded step, by parameter. Elements that are exactly
    0 in both runs, as an embedding's unused rows are, are no noise."""
    noisy: dict[str, Tensor] = {}
    silent: dict[str, Tensor] = {}
    for step, gradients in reference.gradients.items():
        yardstick = largest_element(gradients)
        for name, gradient in gradients.items():
            got = case.gradients.get(step, {}).get(name, gradient)
            if got.shape != gradient.shape:
                continue
            # A reference in less than fp32 would leave nothing but noise; it still sums in fp32.
            epsilon = min(torch.finfo(gradient.dtype).eps, torch.finfo(torch.float32).eps)
            small = gradient.double().abs() <= NOISE * epsilon * yardstick
            zero = (gradient == 0) & (got == 0)
            noisy[name] = noisy[name] & small if name in noisy else small
            silent[name] = silent[name] & zero if name in silent else zero
    return {name: small & ~silent[name] for name, small in noisy.items()}


def _starting_weights(case: Trajectory, reference: Trajectory) -> Iterable[Difference]:
    yield from _unmatched("starting weights", 0, case.starting_parameters, reference.starting_parameters)
    for name, right in reference.starting_parameters.items():
        got = case.starting_parameters.get(name)
        if got is not None and got.shape == right.shape:
            relative = _ratio(_peak(got.double() - right.double()), _peak(right))
            yield Difference(step=0, quantity="starting weights", name=name, relative=relative)


def _scalars(case: Trajectory, reference: Trajectory, step: int) -> Iterable[Difference]:
    got_rates, right_rates = set(case.learning_rates[step]), set(reference.learning_rates[step])
    if not _same_rates(got_rates, right_rates):
        reason = f"the learning rate is {_listed(got_rates)} where the reference has {_listed(right_rates)}"
        yield Difference(step=step, quantity="learning rate", relative=math.inf, reason=reason)
    if case.skipped[step] != reference.skipped[step]:
        who = "the case, not the reference," if case.skipped[step] else "the reference, not the case,"
        yield Difference(
            step=step, quantity="skipped step", relative=math.inf, reason=f"{who} skipped the update of step {step}"
        )
    loss, right_loss = case.losses[step], reference.losses[step]
    skipped = case.skipped[step] and reference.skipped[step]
    if not (skipped and not math.isfinite(loss) and not math.isfinite(right_loss)):
        yield _scalar("loss", step, loss, right_loss)
    if skipped:
        return
    norm, right_norm = case.gradient_norms[step], reference.gradient_norms[step]
    if norm is not None and right_norm is not None:
        yield _scalar("gradient norm", step, norm, right_norm)
    elif right_norm is not None:
        reason = f"no gradient norm was told at step {step}"
        yield Difference(step=step, quantity="gradient norm", relative=math.inf, reason=reason)


def _evaluation(case: Trajectory, reference: Trajectory, step: int) -> Iterable[Difference]:
    """Of an implementation that does not evaluate there is nothing to compare."""
    got, right = case.evaluation_loss, reference.evaluation_loss
    if got is None or right is None:
        return
    if math.isfinite(got) or math.isfinite(right):
        yield _scalar("evaluation loss", step, got, right)


def _scalar(quantity: Quantity, step: int, got: float, right: float) -> Difference:
    if math.isfinite(got) and math.isfinite(right):
        return Difference(step=step, quantity=quantity, relative=_ratio(abs(got - right), abs(right)))
    reason = f"the {quantity} is {got} where the reference has {right}"
    return Difference(step=step, quantity=quantity, relative=math.inf, reason=reason)


def _gradients(case: Trajectory, reference: Trajectory, step: int) -> Iterable[Difference]:
    if case.skipped[step] and reference.skipped[step]:
        return
    right, got = reference.gradients[step], case.gradients.get(step, {})
    yardstick = largest_element(right)
    yield from _unmatched("gradient", step, got, right)
    for name in right:
        if name in got and got[name].shape == right[name].shape:
            yield _tensor("gradient", step, name, got[name], relative_gradient(got[name], right[name], yardstick))


def _parameters(case: Trajectory, reference: Trajectory, step: int) -> Iterable[Difference]:
    yield from _unmatched("parameter", step, case.parameters, reference.parameters)
    started = case.starting_parameters.keys() & reference.starting_parameters.keys()
    noisy = noisy_elements(case, reference)
    updates = (
        _peak(reference.parameters[name].double() - start.double())
        for name, start in reference.starting_parameters.items()
        if name in reference.parameters
    )
    largest_update = max(updates, default=0.0)
    for name, right in reference.parameters.items():
        got = case.parameters.get(name)
        if got is None or got.shape != right.shape or name not in started:
            continue
        start, noise = case.starting_parameters[name], noisy.get(name)
        if noise is not None and not _peak((got.double() - start.double())[noise]) <= 2 * largest_update:
            noise = None
        relative = relative_update(got, right, start, reference.starting_parameters[name], noise)
        yield _tensor("parameter", step, name, got, relative)


def _buffers(case: Trajectory, reference: Trajectory, step: int) -> Iterable[Difference]:
    yield from _unmatched("buffer", step, case.buffers, reference.buffers)
    for name, right in reference.buffers.items():
        got = case.buffers.get(name)
        if got is None or got.shape != right.shape:
            continue
        if right.is_floating_point():
            relative = relative_gradient(got, right, 0.0)
        else:
            relative = 0.0 if torch.equal(got, right) else math.inf
        yield _tensor("buffer", step, name, got, relative)


def _replicas(case: Trajectory) -> Iterable[Difference]:
    groups = case.replica_groups or (tuple(case.replica_checksums),)
    for step in range(case.num_steps):
        for group in groups:
            sums = {rank: case.replica_checksums[rank][step] for rank in group if rank in case.replica_checksums}
            missing = [rank for rank in group if rank not in sums]
            others = [rank for rank, value in sums.items() if value != sums[min(sums)]]
            if missing:
                reason = f"no checksum of what {_ranks(missing)} must hold in common with {_ranks(group[:1])}"
            elif others:
                reason = f"{_ranks(others)} and rank {min(sums)} no longer hold the same bits"
            else:
                continue
            yield Difference(step=step, quantity="replicas", relative=math.inf, reason=reason)


def _unmatched(
    quantity: Quantity, step: int, got: Mapping[str, Tensor], right: Mapping[str, Tensor]
) -> Iterable[Difference]:
    """Names that only one side has, and shapes that differ."""
    for name in [*right, *(name for name in got if name not in right)]:
        if name not in got:
            reason = f"the {quantity} of {name!r} is missing"
        elif name not in right:
            reason = f"a {quantity} of {name!r}, which the reference has not"
        elif got[name].shape != right[name].shape:
            reason = f"the {quantity} of {name!r} has shape {list(got[name].shape)}, not {list(right[name].shape)}"
        else:
            continue
        yield Difference(step=step, quantity=quantity, name=name, relative=math.inf, reason=reason)


def _tensor(quantity: Quantity, step: int, name: str, got: Tensor, relative: float) -> Difference:
    reason = None
    if not math.isfinite(relative):
        relative = math.inf
        if got.is_floating_point() and not bool(torch.isfinite(got).all()):
            reason = f"the {quantity} of {name!r} is not finite"
    return Difference(step=step, quantity=quantity, name=name, relative=relative, reason=reason)


def _same_rates(got: set[float], right: set[float]) -> bool:
    """The same distinct rates; how many groups have each is the implementation's business."""
    return all(
        any(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-300) for b in theirs)
        for ours, theirs in ((got, right), (right, got))
        for a in ours
    )


def _listed(values: Iterable[float]) -> str:
    return " and ".join(f"{value:.6g}" for value in sorted(values)) or "none"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _ratio(difference: float, scale: float) -> float:
    """NaN counts as infinitely far; no difference is none, whatever the scale."""
    if difference == 0:
        return 0.0
    if math.isnan(difference) or math.isnan(scale) or scale == 0:
        return math.inf
    return difference / scale


def _peak(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _mean(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().mean()) if tensor.numel() else 0.0
