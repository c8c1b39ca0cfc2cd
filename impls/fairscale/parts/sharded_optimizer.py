"""The recipe's optimizer inside FairScale's OSS, and what neither it nor what wraps it takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from harness.layout import Layout
from harness.optimizer import RecipeOptimizer, torch_optimizer
from harness.parameters import logical_parameters
from harness.workload import Workload


def why_not(workload: Workload, layout: Layout, device: torch.device, who: str) -> str | None:
    """Why `who`, which shards over the data axis by OSS, cannot train this, or None."""
    if (layout.tensor, layout.pipeline) != (1, 1) or layout.shard not in (None, layout.data):
        return f"{who} takes a data degree and shards over all of it, got {layout}"
    if workload.synchronise_batch_norm and device.type == "cpu":
        return "torch.nn.SyncBatchNorm runs on accelerators only"
    dtypes = _dtypes_of_fixed(workload)
    if len(dtypes) > 1:
        return f"OSS puts an owner's parameters into one buffer, of one dtype, got {', '.join(dtypes)}"
    return workload.fits_data_degree(layout.data)


def sharded_optimizer(workload: Workload, group: dist.ProcessGroup, groups: list[dict[str, object]]) -> Optimizer:
    """OSS over the decay groups, of which each rank gets a torch optimizer over its own part of each."""
    from fairscale.optim.oss import OSS

    for decay_group in groups:
        for tensor in decay_group["params"]:  # type: ignore[attr-defined]  # a list of tensors
            # Masters too: what requires no gradient is in no buffer, so that it would never be broadcast.
            tensor.requires_grad_()
    made: Optimizer = OSS(groups, optim=partial(torch_optimizer, workload.training), group=group)
    return made


def moments(sharded: Any) -> Iterator[Tensor]:
    """This rank's share of the states; OSS itself has none."""
    if sharded is not None:
        for state in sharded.optim.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def owners_by_name(optimizer: RecipeOptimizer) -> dict[str, int]:
    """The rank that OSS has given each parameter to."""
    names = {id(tensor): name for name, tensor in zip(optimizer.names, optimizer.masters, strict=True)}
    sharded: Any = optimizer.optimizer
    return {
        names[id(tensor)]: rank
        for rank, groups in enumerate(sharded.partition_parameters())
        for decay_group in groups
        for tensor in decay_group["params"]
    }


def _dtypes_of_fixed(workload: Workload) -> list[str]:
    """The dtypes of the trainable parameters where the workload keeps those it was built with."""
    if not workload.fixed_dtypes:
        return []
    registry = logical_parameters(workload.model_without_memory(), workload.decays)
    return sorted({str(parameter.dtype).removeprefix("torch.") for parameter in registry if parameter.trainable})
