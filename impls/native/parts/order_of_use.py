"""In which order a forward pass uses the parameters: buckets are filled in the reverse of it, since that is the order
in which backward completes their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from harness.parameters import LogicalParameter
from harness.tensors_in_use import Operations, names_by_storage, storage_key, tensors_in
from harness.workload import Workload, in_compute_precision


def order_of_use(workload: Workload, data_degree: int) -> list[str]:
    """Names of all parameters, in the order in which the operations of a forward pass first touch them; the same on
    every rank, since all of them look at the first data rank's share, which may differ in shape from their own.

    A forward pass of another model on the meta device, which computes nothing, finds it; what the pass does not reach
    is left out, and so is everything of a model that cannot be built or run there (its control flow depends on values).
    """
    inputs = first_inputs(workload, data_degree)
    try:
        return _traced(workload, inputs)
    except Exception:  # whatever a model does with tensors that have no values
        return []


def first_inputs(workload: Workload, data_degree: int) -> Tensor:
    """What the first data rank feeds forward first."""
    return workload.batch(0, data_rank=0, data_degree=data_degree).micro_batches[0].inputs


def forward_without_values(model: nn.Module, inputs: Tensor) -> Any:
    """The outputs on the meta device of a model that lies there; a model that asks for values raises what it likes."""
    with torch.no_grad(), torch.device("meta"):
        return model(inputs.to("meta"))


def in_order_of_use(
    workload: Workload, data_degree: int, parameters: Iterable[LogicalParameter]
) -> list[LogicalParameter]:
    """`parameters` in that order; what no forward reaches comes first, in its own: nothing waits for it then, where
    buckets are filled from the other end."""
    by_name = {parameter.name: parameter for parameter in parameters}
    order = order_of_use(workload, data_degree)
    reached = set(order)
    return [by_name[name] for name in (*(n for n in by_name if n not in reached), *order) if name in by_name]


def _traced(workload: Workload, inputs: Tensor) -> list[str]:
    model = in_compute_precision(workload, workload.model_without_memory())
    names = names_by_storage(model, [name for name, _ in model.named_parameters()])  # a tied one under its first name
    touched: dict[str, None] = {}

    def note(value: object) -> None:
        for tensor in tensors_in(value):
            touched.update(dict.fromkeys(names.get(storage_key(tensor), ())))

    with Operations(note):
        forward_without_values(model, inputs)
    return list(touched)
