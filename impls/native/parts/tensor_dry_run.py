"""What tensor parallelism exchanges in a step and holds, found by running one rank's slice on tensors without memory:
this very code as any rank of any number of ranks, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.parameters import LogicalParameter, all_reduce_wire_bytes
from harness.workload import Workload, in_compute_precision
from impls.native.parts.tensor_exchange import Finish, TensorExchange
from impls.native.parts.tensor_model import TensorSlice

_META = torch.device("meta")
_NORM_BYTES = torch.float64.itemsize


class CountingExchange(TensorExchange):
    """Exchanges nothing, and counts: `sent_bytes`, of the first of `num_ranks` ranks, which has the largest pieces, and
    `largest_bytes`, what it sends at once."""

    def __init__(self, num_ranks: int) -> None:
        self.rank, self.num_ranks = 0, num_ranks
        self.sent_bytes = 0
        self.largest_bytes = 0

    def room(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def start_sum(self, own: Tensor) -> Finish:
        self._sends(own, all_reduce_wire_bytes(own.nbytes, self.num_ranks))
        return lambda: own

    def start_gather(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Finish:
        self._sends(own, (self.num_ranks - 1) * own.nbytes)
        shape = list(own.shape)
        shape[dim] = sum(sizes)
        return lambda: own.new_empty(shape)

    def start_scatter_sum(self, own: Tensor, dim: int, sizes: Sequence[int]) -> Finish:
        row_bytes = own.nbytes // max(1, own.shape[dim])
        self._sends(own, (sum(sizes) - sizes[0]) * row_bytes)
        return lambda: own.narrow(dim, 0, sizes[0]).contiguous()

    def _sends(self, own: Tensor, num_bytes: int) -> None:
        self.sent_bytes += num_bytes
        self.largest_bytes = max(self.largest_bytes, own.nbytes)


@dataclass(frozen=True, kw_only=True)
class TensorCosts:
    """Of the first rank: its `parameters` as they lie there, the bytes it sends in a step, and the most it sends at
    once."""

    parameters: tuple[LogicalParameter, ...]
    sent_bytes: int
    largest_bytes: int


def tensor_costs(workload: Workload, degree: int, *, data_degree: int, cuts_sequence: bool) -> TensorCosts | None:
    """None where the model does not run without values."""
    exchange = CountingExchange(degree)
    try:
        model = TensorSlice(
            workload,
            _META,
            exchange,
            None,
            "tensor parallelism",
            cuts_sequence=cuts_sequence,
            data_degree=data_degree,
            module=in_compute_precision(workload, workload.model_without_memory()),
        )
        for micro_batch in workload.batch(0, data_degree=data_degree).to(_META).micro_batches:
            with torch.device(_META):
                model.loss_sum(micro_batch).backward()
    except (NotImplementedError, RuntimeError):  # whatever a model does with tensors that have no values
        return None
    partial = [p for p in model.parameters if p.trainable and model.kind(p.name) == "partial"]
    sent = exchange.sent_bytes
    precision = workload.precision
    for dtype in dict.fromkeys(parameter.dtype for parameter in partial):
        gradient = precision.gradient if precision.master else dtype
        flat = sum(p.num_elements for p in partial if p.dtype == dtype) * gradient.itemsize
        sent += all_reduce_wire_bytes(flat, degree)
    if workload.training.checks_norm:
        sent += (degree - 1) * _NORM_BYTES
    return TensorCosts(parameters=model.parameters, sent_bytes=sent, largest_bytes=exchange.largest_bytes)
