"""A few steps of training in one process that plays all data ranks, rightly or with a fault put in by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from harness.evaluation import evaluating
from harness.models.awkward.small_gpt import LENGTH, small_gpt
from harness.optimizer import RecipeOptimizer
from harness.parity import Tolerance
from harness.trajectory import Trajectory
from harness.workload import MicroBatch, Training, Workload, in_precision

torch.set_num_threads(1)  # as a rank does: tensors this small only wait for each other

DATA_DEGREE, NUM_MICRO_BATCHES, NUM_STEPS = 2, 3, 4
SHARES = [(rank, index) for rank in range(DATA_DEGREE) for index in range(NUM_MICRO_BATCHES)]
# Valid tokens of the two samples of each share, for the steps of an epoch in turn: 5 + 1 in the first.
COUNTS = [5, 1, 8, 2, 7, 3, 8, 4, 6, 8, 8, 8]

Gradients = dict[str, Tensor]
Shares = Mapping[tuple[int, int], Gradients]
Counts = Mapping[tuple[int, int], int]
Reduction = Callable[[Shares, Counts, int], Gradients]
"""From the gradients of the shares' loss sums, their token counts and the step to what the optimizer gets."""


def gpt_workload(precision: str = "fp64", *, tied: bool = False, seed: int = 0, **training: object) -> Workload:
    """A decoder whose 6 shares a step hold between 7 and 16 valid tokens."""
    recipe = Training(global_batch_size=12, num_micro_batches=NUM_MICRO_BATCHES, optimizer="adamw", seed=seed)
    num_valid = torch.tensor(COUNTS * 6)[:64].clamp(max=LENGTH)
    workload = small_gpt(replace(recipe, **training), tied=tied, num_valid=num_valid)  # type: ignore[arg-type]
    return in_precision(workload, precision)


def weighted(shares: Shares, weights: Mapping[tuple[int, int], float]) -> Gradients:
    total: Gradients = {}
    for key, weight in weights.items():
        for name, gradient in shares[key].items():
            part = gradient * weight
            total[name] = total[name] + part if name in total else part
    return total


def right(shares: Shares, counts: Counts, step: int) -> Gradients:
    return weighted(shares, dict.fromkeys(shares, 1 / sum(counts.values())))


def train(
    workload: Workload,
    reduction: Reduction = right,
    *,
    data_degree: int = DATA_DEGREE,
    num_steps: int = NUM_STEPS,
    order: Callable[[list[tuple[int, int]]], list[tuple[int, int]]] = list,
) -> Trajectory:
    """`order` permutes the shares, and with them the order of every addition."""
    model = workload.build_model()
    optimizer = RecipeOptimizer(model, workload)

    def parameters() -> Gradients:
        masters = dict(zip(optimizer.names, optimizer.masters, strict=True))
        return {name: masters.get(name, p).detach().clone() for name, p in model.named_parameters()}

    starting, losses, norms, gradients, rates = parameters(), [], [], {}, []
    for step in range(num_steps):
        micro_batches = {
            (rank, index): micro_batch
            for rank in range(data_degree)
            for index, micro_batch in enumerate(
                workload.batch(step, data_rank=rank, data_degree=data_degree).micro_batches
            )
        }
        if step == num_steps - 1:
            evaluation_loss = evaluated(workload, model, micro_batches)
        shares, loss_sum = {}, 0.0
        for key in order(list(micro_batches)):
            loss = workload.loss_sum(model, micro_batches[key])
            loss.backward()
            loss_sum += float(loss.detach())
            shares[key] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            for p in model.parameters():
                p.grad = None
        counts = {key: micro_batches[key].num_tokens for key in shares}
        reduced = reduction(shares, counts, step)
        if step < 2:
            gradients[step] = {name: gradient.clone() for name, gradient in reduced.items()}
        for name, p in model.named_parameters():
            p.grad = reduced.get(name)
        update = optimizer.step(tracks_norm=True)
        for p in model.parameters():
            p.grad = None
        losses.append(loss_sum / sum(counts.values()))
        norms.append(float(update.gradient_norm) if update.gradient_norm is not None else None)
        rates.append(update.learning_rates)
    return Trajectory(
        losses=losses,
        evaluation_loss=evaluation_loss,
        gradient_norms=norms,
        gradients=gradients,
        starting_parameters=starting,
        parameters=parameters(),
        buffers={name: buffer.clone() for name, buffer in model.named_buffers()},
        skipped=[False] * num_steps,
        learning_rates=rates,
        replica_checksums={rank: ["same"] * num_steps for rank in range(data_degree)},
    )


def evaluated(workload: Workload, model: nn.Module, micro_batches: Mapping[tuple[int, int], MicroBatch]) -> float:
    with evaluating(model):
        loss_sum = sum(float(workload.loss_sum(model, micro_batch)) for micro_batch in micro_batches.values())
    return loss_sum / sum(micro_batch.num_tokens for micro_batch in micro_batches.values())


def _only(chosen: Callable[[tuple[int, int]], bool], times: float = 1.0) -> Reduction:
    return lambda shares, counts, step: weighted(
        shares, {key: times / sum(counts.values()) for key in shares if chosen(key)}
    )


def _own_count(same: Callable[[tuple[int, int], tuple[int, int]], bool], parts: int) -> Reduction:
    """A mean over `parts` groups of shares of each group's mean."""
    return lambda shares, counts, step: weighted(
        shares,
        {key: 1 / (parts * sum(count for other, count in counts.items() if same(key, other))) for key in shares},
    )


def _first_by_own_count(shares: Shares, counts: Counts, step: int) -> Gradients:
    count = sum(count for key, count in counts.items() if key[0] == 0)
    return weighted(shares, {key: 1 / count for key in shares if key[0] == 0})


def _never_divided(shares: Shares, counts: Counts, step: int) -> Gradients:
    return weighted(shares, dict.fromkeys(shares, 1.0))


def _first_of_its_own_means(shares: Shares, counts: Counts, step: int) -> Gradients:
    return weighted(shares, {key: 1 / (NUM_MICRO_BATCHES * counts[key]) for key in shares if key[0] == 0})


# The first step's 68 tokens: 30 on rank 0 (6, 10, 14 by micro-batch) and 38 on rank 1 (10, 12, 16).
FAULTS: dict[str, Reduction] = {
    "no reduction, global count": _only(lambda key: key[0] == 0),
    "no reduction, own count": _first_by_own_count,
    "no reduction, mean of means": _first_of_its_own_means,
    "never divided": _never_divided,
    "double average": _only(lambda key: True, 1 / DATA_DEGREE),
    "times data degree": _only(lambda key: True, DATA_DEGREE),
    "divided by micro-batches": _only(lambda key: True, 1 / NUM_MICRO_BATCHES),
    "mean of means over ranks": _own_count(lambda one, other: one[0] == other[0], DATA_DEGREE),
    "mean of means over micro-batches": _own_count(lambda one, other: one[1] == other[1], NUM_MICRO_BATCHES),
    "mean of means over both": _own_count(lambda one, other: one == other, DATA_DEGREE * NUM_MICRO_BATCHES),
    "last micro-batch": _only(lambda key: key[1] == NUM_MICRO_BATCHES - 1),
    "first micro-batch": _only(lambda key: key[1] == 0),
    "micro-batch 1 lost": _only(lambda key: key[1] != 1),
    "identical data": _only(lambda key: key[0] == 0, DATA_DEGREE),
}


@cache
def reference(lane: str) -> Trajectory:
    """What a case of the lane is held against: in bf16 the fp32 run."""
    return train(gpt_workload("fp64" if lane == "fp64" else "fp32"), data_degree=1)


@cache
def tolerance(lane: str) -> Tolerance:
    if lane == "fp64":
        return Tolerance.exact()
    if lane == "fp32":
        return Tolerance.from_noise(reference(lane), train(gpt_workload("fp32"), order=lambda keys: keys[::-1]))
    return Tolerance.from_seeds(
        [tuple(train(gpt_workload(name, seed=seed), data_degree=1) for name in ("bf16", "fp32")) for seed in (1, 2, 3)]
    )


@cache
def trained(lane: str, fault: str | None = None) -> Trajectory:
    """A case of the lane; its additions have another order than the reference's."""
    return train(gpt_workload(lane), FAULTS[fault] if fault else right, order=lambda keys: keys[::-1])
