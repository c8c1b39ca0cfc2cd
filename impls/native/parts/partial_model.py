"""A model of whose parameters a rank needs some alone: the others take no memory, not even while it is built."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from harness.overlaps import kept_tensors
from harness.parameters import has_hooks
from harness.workload import Workload


def build_partly(workload: Workload, names: Collection[str], device: torch.device) -> nn.Module:
    """The workload's model on `device`, of whose parameters only those in `names` have values; all have their shapes.

    Whole where that cannot be: without a file of starting weights; where a module keeps tensors beside its parameters
    (rotary frequencies, a view of a weight), which are made as the model is built and the file may lack; or where a
    parameter has hooks, which belong to the very object.
    """
    if workload.weights is None:
        return workload.build_model()
    model = workload.model_without_memory()
    if any(True for _ in kept_tensors(model)) or any(map(has_hooks, model.parameters())):
        return workload.build_model()
    stored: dict[str, Tensor] = torch.load(workload.weights, weights_only=True, mmap=True)
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied one stays one
    for name, parameter in model.named_parameters():
        dtype = workload.dtype_in_training(parameter.dtype)
        if name in names:
            tensor = torch.empty_like(parameter, dtype=dtype, device=device).detach().copy_(stored[name])
        else:
            tensor = torch.empty((), dtype=dtype, device=device).expand(parameter.shape)
        made[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        vars(made[parameter]).update(vars(parameter))  # marks that `Workload.decays` may read
    for module in model.modules():
        for kind, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, kind, made[parameter])
    return workload.ready_to_train(model)
