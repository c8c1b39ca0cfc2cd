"""Parameters that a step leaves unused, on some ranks or on all, where FSDP2 reduces gradients.

fully_shard gathers and reduces each unit when forward and backward come to it, in whatever order that is, and adds up
what stands at the same place in the order of each rank: all ranks must do alike, or units get each other's gradients,
in silence where they are of one size. So

- a parameter without a gradient is reduced as zeros;
- the model's inputs are differentiated too. Backward is done with a unit when it has the gradient of the unit's inputs;
  the second unit's have none on a rank that leaves out what the first one trains, which would then reduce it last;
- no rank may leave out a whole unit.

Zeros are no gradient: they would decay, and move by their momentum. So a parameter that no rank used keeps none, which
takes a further exchange of a byte for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from harness.workload import MicroBatch


class UsedParameters:
    """Watches the trained `parameters`, by name, of a sharded model; `group` are all ranks that train it."""

    def __init__(self, model: FSDPModule, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = parameters
        self._group = group
        self._used_here: set[str] = set()
        self._entered: set[nn.Module] = set()
        whole = cast(nn.Module, model)  # the class of a sharded module is made at run time
        self._units = {name: module for name, module in whole.named_modules() if _is_unit(module)}
        model.set_reduce_scatter_unused_params(True)
        for unit in self._units.values():
            unit.register_forward_pre_hook(self._enter)
            # Autograd's leaves are the whole parameters, which FSDP makes once.
            cast(FSDPModule, unit).unshard()
            for name, parameter in whole.named_parameters():
                if name in parameters and not isinstance(parameter, DTensor):
                    parameter.register_post_accumulate_grad_hook(partial(self._use, name))
            cast(FSDPModule, unit).reshard()

    def start_step(self) -> None:
        self._used_here.clear()

    def start_forward(self, micro_batch: MicroBatch) -> MicroBatch:
        """The same micro-batch, to be differentiated by its inputs where they are numbers."""
        self._entered.clear()
        if not micro_batch.inputs.is_floating_point():
            return micro_batch
        return replace(micro_batch, inputs=micro_batch.inputs.detach().requires_grad_())

    def end_forward(self) -> None:
        """RuntimeError if this rank has left out a unit."""
        for name, unit in self._units.items():
            if unit not in self._entered:
                raise RuntimeError(
                    f"torch.fsdp: this rank's forward left out {name}: fully_shard pairs up what ranks gather by its "
                    f"order, so that every rank must call every block"
                )

    def drop_unused(self) -> None:
        """Takes the zeros from the parameters that no rank used. Collective."""
        device = next(iter(self._parameters.values())).device
        used = torch.tensor([name in self._used_here for name in self._parameters], dtype=torch.uint8, device=device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        for parameter, is_used in zip(self._parameters.values(), used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None

    def _use(self, name: str, _: Any) -> None:
        self._used_here.add(name)

    def _enter(self, unit: nn.Module, _: Any) -> None:
        self._entered.add(unit)


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)
