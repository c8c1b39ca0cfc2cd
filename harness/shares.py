"""Shares: the gradient that each data rank's micro-batch contributes to one step, found in one process.

Every way to get a data-parallel gradient wrong is some other sum of these shares; harness.explanation tries them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from harness.optimizer import RecipeOptimizer
from harness.parameters import logical_parameters
from harness.workload import MicroBatch, Workload


@dataclass(frozen=True, kw_only=True)
class Share:
    """One data rank's micro-batch of one step. `gradients` are of the loss *sum*, without the parameters it does not
    use. `num_targets` counts the ignored ones too; a share without tokens has none."""

    data_rank: int
    micro_batch: int
    num_tokens: int
    num_targets: int
    num_samples: int
    loss_sum: float
    gradients: dict[str, Tensor]


def partial_gradients(
    workload: Workload, data_degree: int, step: int = 0, weights: Mapping[str, Tensor] | None = None
) -> tuple[Share, ...]:
    """The shares of `step`, when training starts from `weights` (by logical name; None: the workload's own)."""
    steps = _train(_build(workload, weights), workload, data_degree)
    return next(islice(steps, step, None))


def gradients_by_use(
    workload: Workload, data_degree: int, weights: Mapping[str, Tensor] | None = None
) -> dict[str, dict[str, Tensor]]:
    """For each tied parameter the normalised gradient that each of its names alone contributes to step 0."""
    model = _build(workload, weights)
    ties = _untie(model)
    if not ties:
        return {}
    with torch.random.fork_rng(devices=[]):
        total = total_gradients(_shares(model, workload, data_degree, 0))
    divisor = workload.global_num_tokens(0)
    return {
        name: {use: total[use] / divisor for use in (name, *aliases) if use in total} for name, aliases in ties.items()
    }


def retrained(
    workload: Workload, data_degree: int, num_steps: int, weights: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The parameters after `num_steps` steps of `workload` in one process, by logical name."""
    model = _build(workload, weights)
    for _ in islice(_train(model, workload, data_degree), num_steps):
        pass
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def total_gradients(shares: Iterable[Share]) -> dict[str, Tensor]:
    """The gradient of the whole batch's loss sum."""
    total: dict[str, Tensor] = {}
    for share in shares:
        for name, gradient in share.gradients.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def _build(workload: Workload, weights: Mapping[str, Tensor] | None) -> nn.Module:
    model = workload.build_model()
    if weights is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    return model


def _train(model: nn.Module, workload: Workload, data_degree: int) -> Iterator[tuple[Share, ...]]:
    """The shares of step after step; each step is taken before its shares are given."""
    optimizer = RecipeOptimizer(model, workload)
    step = 0
    while True:
        with torch.random.fork_rng(devices=[]):
            shares = tuple(_shares(model, workload, data_degree, step))
        total = total_gradients(shares)
        divisor = workload.global_num_tokens(step)
        for name, parameter in model.named_parameters():
            parameter.grad = total[name] / divisor if name in total else None
        optimizer.step(tracks_norm=False)
        for parameter in model.parameters():
            parameter.grad = None
        yield shares
        step += 1


def _shares(model: nn.Module, workload: Workload, data_degree: int, step: int) -> Iterator[Share]:
    """Each rank starts from the same buffers, and rank 0's win, as in the reference."""
    batches = [workload.batch(step, data_rank=rank, data_degree=data_degree) for rank in range(data_degree)]
    if workload.synchronise_batch_norm:
        for index in range(workload.training.num_micro_batches):
            micro_batches = [batch.micro_batches[index] for batch in batches]
            yield from _jointly(model, workload, micro_batches, index)
        return
    starting = [buffer.detach().clone() for buffer in model.buffers()]
    winning: list[Tensor] = []
    for rank, batch in enumerate(batches):
        for index, micro_batch in enumerate(batch.micro_batches):
            loss = workload.loss_sum(model, micro_batch)
            yield _share(model, micro_batch, rank, index, loss)
        winning = winning or [buffer.detach().clone() for buffer in model.buffers()]
        _restore(model, starting)
    _restore(model, winning)


def _jointly(model: nn.Module, workload: Workload, micro_batches: list[MicroBatch], index: int) -> Iterator[Share]:
    """The shares of one micro-batch of the whole, whose samples share their batch statistics: one forward, cut into the
    ranks' rows afterwards."""
    outputs = model(torch.cat([micro_batch.inputs for micro_batch in micro_batches]))
    rows = outputs.split([len(micro_batch.inputs) for micro_batch in micro_batches])
    for rank, (micro_batch, own_rows) in enumerate(zip(micro_batches, rows, strict=True)):
        loss = workload.loss_sum(_Constant(own_rows), micro_batch)
        yield _share(model, micro_batch, rank, index, loss, retain_graph=rank < len(micro_batches) - 1)


class _Constant:
    """A model whose outputs are known already."""

    def __init__(self, outputs: Tensor) -> None:
        self._outputs = outputs

    def __call__(self, inputs: Tensor) -> Tensor:
        return self._outputs


def _share(
    model: nn.Module, micro_batch: MicroBatch, rank: int, index: int, loss: Tensor, *, retain_graph: bool = False
) -> Share:
    if loss.requires_grad:
        loss.backward(retain_graph=retain_graph)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name], parameter.grad = parameter.grad, None
    counted = micro_batch.num_tokens > 0
    return Share(
        data_rank=rank,
        micro_batch=index,
        num_tokens=micro_batch.num_tokens,
        num_targets=micro_batch.targets.numel() if counted else 0,
        num_samples=len(micro_batch.inputs) if counted else 0,
        loss_sum=float(loss.detach()),
        gradients=gradients,
    )


def _restore(model: nn.Module, buffers: list[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)


def _untie(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Gives every further name of a tied parameter a parameter of its own; the names by the first one. Two names of one
    module that is used twice cannot be told apart and stay one."""
    ties = {}
    for parameter in logical_parameters(model):
        owners = {id(model.get_submodule(parameter.name.rpartition(".")[0]))}
        separate = []
        for alias in parameter.aliases:
            path, _, leaf = alias.rpartition(".")
            owner = model.get_submodule(path)
            if id(owner) not in owners:
                owners.add(id(owner))
                tied = getattr(owner, leaf)
                setattr(owner, leaf, nn.Parameter(tied.detach().clone(), requires_grad=tied.requires_grad))
                separate.append(alias)
        if separate and parameter.trainable:
            ties[parameter.name] = tuple(separate)
    return ties
