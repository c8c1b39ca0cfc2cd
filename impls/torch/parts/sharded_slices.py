"""A model cut along the tensor axis, of whose slices fully_shard leaves each data rank a shard: torch's own composition
over a two-dimensional device mesh.

                     tensor 0              tensor 1
    data 0 | first rows of slice 0 | first rows of slice 1 |     a slice is gathered along data where it is used,
    data 1 | last rows of slice 0  | last rows of slice 1  |     activations are summed along tensor
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from harness.evaluation import evaluating, sum_losses
from harness.implementation import EvaluationOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import global_norm, norm_over_ranks
from harness.workload import Batch, Workload
from impls.torch.parts.resharding import reshard
from impls.torch.parts.sharded_units import group_blocks
from impls.torch.parts.tensor_slices import cut, local_part


class ShardedSlices:
    """This rank's shards in `module`; `stepped` are the trainable ones by name, as plain tensors. Collective."""

    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        self._workload, self._device, self._layout = workload, device, layout
        self._tensor_group, self._world = mesh.group("tensor"), mesh.group("world")
        self._is_first_slice = mesh.coordinates.tensor == 0
        self.module = workload.build_model().to(device)
        axes = mesh.device_mesh()
        self._cut = cut(self.module, workload, axes["tensor"])
        self._cut_dims = {name: _cut_dim(parameter) for name, parameter in self.module.named_parameters()}
        units = group_blocks(workload, self.module, blocks_per_group=1)
        for index, (block,) in enumerate(units):
            # Backward begins with the last one.
            fully_shard(block, mesh=axes["data"], reshard_after_forward=index < len(units) - 1)
        fully_shard(self.module, mesh=axes["data"])
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                # A plain sum; torch would divide by the number of ranks, or multiply before it sums, which gloo cannot.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        named = dict(self.module.named_parameters())
        self._parameters = {parameter.name: named[parameter.name] for parameter in self._cut.registry}
        self.stepped = {name: local_part(parameter) for name, parameter in self._parameters.items()}

    def forward_backward(self, batch: Batch) -> tuple[Tensor | None, int]:
        """All micro-batches, each of whose gradients are summed into the shards at once; the sum of their losses and
        the number of targets."""
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for parameter in self._parameters.values():
            parameter.grad = None
        with self._loss_of_parts():
            for micro_batch in batch.micro_batches:
                with phase("forward"):
                    loss = self._workload.loss_sum(self.module, micro_batch)
                    objective = loss / batch.global_num_tokens
                with phase("backward"):
                    objective.backward()
                loss_sum += local_part(loss)
                num_tokens += micro_batch.num_tokens
        return loss_sum, num_tokens

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        """Of this data rank's share. Collective."""
        with evaluating(self.module), self._loss_of_parts():
            output = sum_losses(
                batch, lambda micro_batch: local_part(self._workload.loss_sum(self.module, micro_batch)), self._device
            )
        reshard(self.module)
        return output

    def _loss_of_parts(self) -> AbstractContextManager[Any]:
        return loss_parallel() if self._cut.cuts_logits else nullcontext()

    def reduce(self) -> None:
        """What backward has not summed: summands of what is whole on every tensor rank."""
        for name, parameter in self._parameters.items():
            gradient = None if parameter.grad is None else local_part(parameter.grad)
            if gradient is not None and name in self._cut.partial:
                dist.all_reduce(gradient, group=self._tensor_group)
            self.stepped[name].grad = gradient

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm over all ranks, of those of this one; what every tensor rank has counts on the first."""
        counted = [
            gradient for name, gradient in gradients.items() if self._is_first_slice or self._cut_dims[name] is not None
        ]
        return norm_over_ranks(global_norm(counted).to(self._device), self._world)

    def whole(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shards of all ranks put together, by name, on the CPU. Collective; not for timed code."""
        of_ranks: list[Any] = [None] * self._world.size()
        own = {name: local_part(value).cpu() for name, value in values.items()}
        dist.all_gather_object(of_ranks, own, group=self._world)
        return {name: self._whole(name, [of_rank[name] for of_rank in of_ranks]) for name in own}

    def _whole(self, name: str, of_ranks: list[Tensor]) -> Tensor:
        num_slices = self._layout.tensor
        slices = [torch.cat(of_ranks[tensor_rank::num_slices]) for tensor_rank in range(num_slices)]
        dim = self._cut_dims[name]
        return slices[0] if dim is None else self._cut.in_order(name, torch.cat(slices, dim))

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach() for name, buffer in self.module.named_buffers()}

    def received(self) -> Iterable[Tensor]:
        """What is gathered comes and goes within a step."""
        return ()

    def facts(self) -> Mapping[str, str]:
        return {}


def _cut_dim(parameter: Tensor) -> int | None:
    """The dim along which tensor ranks hold unlike parts."""
    placement = parameter.placements[0] if isinstance(parameter, DTensor) else None
    return placement.dim if isinstance(placement, Shard) else None
