"""What tensor parallelism exchanges in a step and holds, found by running one rank's slice on tensors without memory:
this very code as any rank of any number of ranks, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from harness.parameters import LogicalParameter, all_reduce_wire_bytes
from harness.workload import Batch, Workload, in_compute_precision
from impls.native.parts.counting_exchange import CountingExchange
from impls.native.parts.rank_model import Kinds
from impls.native.parts.tensor_model import TensorSlice

_META = torch.device("meta")
_NORM_BYTES = torch.float64.itemsize


@dataclass(frozen=True, kw_only=True)
class TensorCosts:
    """Of the first rank: its `parameters` as they lie there, with their `kinds` by name; the bytes that it sends of a
    step's activations and their gradients, for one sum of the partial gradients, and for the norm, if the recipe needs
    it; the most that it sends at once."""

    parameters: tuple[LogicalParameter, ...]
    kinds: Mapping[str, Kinds]
    activation_bytes: int
    partial_bytes: int
    norm_bytes: int
    largest_bytes: int


def slice_without_values(
    workload: Workload, degree: int, *, data_degree: int, cuts_sequence: bool, module: nn.Module | None = None
) -> tuple[TensorSlice, CountingExchange]:
    """The first rank's slice, which is the largest, of `module`, by itself the model on the meta device; and what
    counts its exchanges."""
    if module is None:
        module = in_compute_precision(workload, workload.model_without_memory())
        workload.checkpoint_activations(module)
    exchange = CountingExchange(degree)
    model = TensorSlice(
        workload,
        next((parameter.device for parameter in module.parameters()), _META),
        exchange,
        None,
        "tensor parallelism",
        cuts_sequence=cuts_sequence,
        data_degree=data_degree,
        module=module,
    )
    return model, exchange


def largest_batch(workload: Workload, data_degree: int) -> Batch:
    """The share of the first step that has most samples: the last data rank's."""
    return workload.batch(0, data_rank=data_degree - 1, data_degree=data_degree)


def tensor_costs(workload: Workload, degree: int, *, data_degree: int, cuts_sequence: bool) -> TensorCosts | None:
    """None where the model does not run without values."""
    try:
        model, exchange = slice_without_values(workload, degree, data_degree=data_degree, cuts_sequence=cuts_sequence)
        for micro_batch in largest_batch(workload, data_degree).to(_META).micro_batches:
            with torch.device(_META):
                model.loss_sum(micro_batch).backward()
    except (NotImplementedError, RuntimeError):  # whatever a model does with tensors that have no values
        return None
    precision = workload.precision
    partial = [p for p in model.parameters if p.trainable and model.kinds(p.name) == ("partial",)]
    partial_bytes = 0
    for dtype in dict.fromkeys(parameter.dtype for parameter in partial):
        gradient = precision.gradient if precision.master else dtype
        flat = sum(p.num_elements for p in partial if p.dtype == dtype) * gradient.itemsize
        partial_bytes += all_reduce_wire_bytes(flat, degree)
    return TensorCosts(
        parameters=model.parameters,
        kinds={parameter.name: model.kinds(parameter.name) for parameter in model.parameters},
        activation_bytes=exchange.sent_bytes,
        partial_bytes=partial_bytes,
        norm_bytes=(degree - 1) * _NORM_BYTES if workload.training.checks_norm else 0,
        largest_bytes=exchange.largest_bytes,
    )
