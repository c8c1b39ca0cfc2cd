"""What tensor parallelism exchanges in a step and holds, found by running one rank's slice on tensors without memory:
this very code as any rank of any number of ranks, in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.parameters import LogicalParameter, all_reduce_wire_bytes
from harness.workload import Workload
from impls.native.parts.counting_exchange import CountingExchange
from impls.native.parts.order_of_use import in_compute_precision
from impls.native.parts.tensor_model import TensorSlice

_META = torch.device("meta")
_NORM_BYTES = torch.float64.itemsize


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
    partial = [p for p in model.parameters if p.trainable and model.kinds(p.name) == ("partial",)]
    sent = exchange.sent_bytes
    precision = workload.precision
    for dtype in dict.fromkeys(parameter.dtype for parameter in partial):
        gradient = precision.gradient if precision.master else dtype
        flat = sum(p.num_elements for p in partial if p.dtype == dtype) * gradient.itemsize
        sent += all_reduce_wire_bytes(flat, degree)
    if workload.training.checks_norm:
        sent += (degree - 1) * _NORM_BYTES
    return TensorCosts(parameters=model.parameters, sent_bytes=sent, largest_bytes=exchange.largest_bytes)
