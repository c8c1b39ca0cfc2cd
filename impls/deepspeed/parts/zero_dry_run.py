"""What a rank holds of gradients in the course of one backward under DeepSpeed's stages 0, 1 and 2, on tensors without
memory: see harness.implementation.Preparation.

    stage 0      every gradient stays, and all are copied into one tensor to be summed; wider once more to be stepped
    stage 1      every gradient stays until backward is over, beside the bucket; then they go bucket by bucket
    stage 2      each goes into the bucket as it is made

    bucket       | a | b | c |         allocated whole at the first gradient, gone after the last sum
    sum          | a | b | c |         a copy of what fills it, where that is more than one rank's; gone once it is made
    kept         | a |                 of each sum what this rank steps a part of, until the update
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from harness.implementation import lending
from impls.deepspeed.parts.zero_partition import Partition, Piece


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How gradients are reduced: in the course of the last micro-batch's backward or after it (`at_once`); in how many
    buckets and of how many elements, none where gradients stay where they are (`contiguous` not set); whether each
    rank's part is told apart in a sum (`scatters`), and goes to that rank alone (`to_owners`); whether the norm is
    taken (`takes_norm`); in which dtypes sums are made, kept and stepped."""

    stage: int
    partition: Partition
    num_micro_batches: int
    at_once: bool
    num_buckets: int
    bucket_elements: int
    contiguous: bool
    scatters: bool
    to_owners: bool
    takes_norm: bool
    sum_dtype: torch.dtype
    kept_dtype: torch.dtype
    master_dtype: torch.dtype


class LentInBackward:
    """Holds what one rank does while it does: the rank that keeps most."""

    def __init__(self, reduction: Reduction, parameters: Mapping[str, Tensor]) -> None:
        self._reduction = reduction
        self._parameters = {name: parameters[name] for name in reduction.partition.pieces}
        self._rank = reduction.partition.largest_rank()
        first = next(iter(self._parameters.values()))
        self._dtype, self._device = first.dtype, first.device
        self._keeps_wider = reduction.kept_dtype != first.dtype
        self._buckets: list[Tensor] = []
        self._filling: dict[str, Tensor | None] = {}  # what is to be summed next; gradients that lie beside the bucket
        self._released_late: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._kept_before: list[Tensor] = []

    def begin_forward(self) -> None:
        """Of the last micro-batch, which finds what those before it have left."""
        if self._reduction.num_micro_batches == 1:
            return
        with lending("gradients"):
            if self._reduction.stage == 2:
                self._kept_before = self._memory_of_kept()
                return
            for parameter in self._parameters.values():
                parameter.grad = torch.empty_like(parameter)
            self._make_buckets()

    def ready(self, name: str) -> None:
        """Autograd has made a gradient."""
        self._make_buckets()
        if self._reduction.at_once:
            self._take(name)

    def make_bucket(self) -> None:
        """One more, which goes with the others."""
        self._buckets.append(self._memory(self._reduction.bucket_elements, self._dtype))

    def end_backward(self) -> None:
        if not self._reduction.stage:
            elements = sum(parameter.numel() for parameter in self._parameters.values())
            self._sum(elements)
            if self._reduction.master_dtype != self._dtype:
                self._memory(elements, self._reduction.master_dtype)  # beside the gradients, for the update
            return
        if not self._reduction.at_once:
            for name in self._parameters:
                self._take(name)
        self._reduce()
        self._buckets.clear()
        self._released_late.clear()
        if self._kept_before:  # to which it has been added
            self._kept = self._kept_before
        self._update()

    def _make_buckets(self) -> None:
        if self._reduction.stage and self._reduction.contiguous and not self._buckets:
            size, num_buckets = self._reduction.bucket_elements, self._reduction.num_buckets
            self._buckets = [self._memory(size, self._dtype) for _ in range(num_buckets)]

    def _take(self, name: str) -> None:
        parameter, reduction = self._parameters[name], self._reduction
        filled = sum(self._parameters[other].numel() for other in self._filling)
        if self._filling and filled + parameter.numel() > reduction.bucket_elements:
            self._reduce()
        goes_into_bucket = reduction.contiguous and parameter.numel() <= reduction.bucket_elements
        self._filling[name] = None if goes_into_bucket else parameter.grad
        parameter.grad = None

    def _reduce(self) -> None:
        reduction = self._reduction
        if self._keeps_wider and not self._kept_before:  # sums are added to it as they are made
            self._kept = self._kept or self._memory_of_kept()
        for elements in self._elements_of_copies():
            self._sum(elements)
        for name, gradient in self._filling.items():
            owned = reduction.partition.owns(self._rank, name)
            if self._keeps_wider:
                continue
            if owned and reduction.contiguous:
                self._kept = self._kept or self._memory_of_kept()
            elif gradient is not None and owned:
                self._kept.append(gradient)
            elif gradient is not None and reduction.stage == 1:
                self._released_late.append(gradient)
        self._filling.clear()

    def _elements_of_copies(self) -> Sequence[int]:
        """Of each sum that is made in a copy of what fills the bucket."""
        reduction = self._reduction
        pieces = [piece for name in self._filling for piece in reduction.partition.pieces[name]]
        if not reduction.contiguous:
            return [_num_elements(pieces)] if len(self._filling) > 1 else []
        if not reduction.scatters:
            return []
        runs = [(owner, list(run)) for owner, run in groupby(pieces, key=lambda piece: piece.owner)]
        if not reduction.to_owners:
            return [_num_elements(pieces)] if len(runs) > 1 else []
        of_owners = [[run for owner, run in runs if owner == one] for one in {owner for owner, _ in runs}]
        return [sum(map(_num_elements, of_owner)) for of_owner in of_owners if len(of_owner) > 1]

    def _sum(self, elements: int) -> None:
        copy = self._memory(elements, self._dtype)
        if self._reduction.sum_dtype != copy.dtype:
            self._memory(elements, self._reduction.sum_dtype)

    def _update(self) -> None:
        """Of one group after the other what the rank steps, made one flat gradient, where it is not that already. The
        norm comes before it, piece by piece, from fp64 copies."""
        if self._reduction.takes_norm:
            own = [
                p.num_elements for of in self._reduction.partition.pieces.values() for p in of if p.owner == self._rank
            ]
            self._memory(max(own, default=0), torch.float64)
        for elements in () if self._keeps_wider else self._reduction.partition.sharded_elements:
            flat = self._memory(elements, self._reduction.kept_dtype)
            if self._reduction.master_dtype != flat.dtype:
                self._memory(elements, self._reduction.master_dtype)
        self._kept.clear()

    def _memory_of_kept(self) -> list[Tensor]:
        """One tensor of all gradients that it steps a part of; of the parts alone where it is wider than they are."""
        partition, dtype = self._reduction.partition, self._reduction.kept_dtype
        if self._keeps_wider:
            return [self._memory(elements, dtype) for elements in partition.sharded_elements]
        return [self._memory(partition.kept_elements(self._rank), dtype)]

    def _memory(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=self._device)


def prepare(model: nn.Module, gradients: Mapping[str, Tensor], *, reduction: Reduction) -> Callable[[Tensor], None]:
    """Has `model` hold what is lent as its forward and its backward go on, its own gradients among it."""
    parameters = dict(model.named_parameters())
    lent = LentInBackward(reduction, parameters)
    for name in gradients:
        parameters[name].grad = None
    for name in reduction.partition.pieces:
        parameters[name].register_post_accumulate_grad_hook(partial(_tell, lent.ready, name))
    model.register_forward_pre_hook(lambda *_: lent.begin_forward())

    def watch_backward(loss: Tensor) -> None:
        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(lent.end_backward))

    return watch_backward


def _tell(ready: Callable[[str], None], name: str, _parameter: Tensor) -> None:
    ready(name)


def _num_elements(pieces: Iterable[Piece]) -> int:
    return sum(piece.num_elements for piece in pieces)
