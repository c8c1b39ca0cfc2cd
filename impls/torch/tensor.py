"""torch's own tensor parallelism: parallelize_module over a device mesh, with the workload's tensor plan in torch's
styles, logits that stay cut and loss_parallel over them, as torch's tutorial has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from harness.evaluation import evaluating, sum_losses
from harness.implementation import EvaluationOutput, Implementation, Prediction, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import clip_coefficient, decay_groups, global_norm, norm_over_ranks, torch_optimizer
from harness.parameters import LogicalParameter, MemoryCategory
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Batch, Workload
from impls.torch.parts import slice_costs
from impls.torch.parts.tensor_slices import cut, local_part


class TorchTensorParallel(Implementation):
    """Embedding and head are cut by the vocabulary. A fused layer's rows are put in the order in which torch's even
    cut gives each rank its own heads. The recipe steps local shards by torch's fused optimizer."""

    strategy = "tensor_parallel"
    makes_gradients = True

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.data, layout.pipeline) != (1, 1):
            return f"tensor parallelism takes a tensor degree alone, got {layout}"
        if workload.precision.master is not None:
            return "parallelize_module keeps no fp32 masters"
        return workload.fits_tensor_degree(layout.tensor)

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        """None where the model does not run without values."""
        costs = slice_costs.slice_costs(workload, layout)
        return None if costs is None else slice_costs.wire_bytes(costs, workload, layout)

    @classmethod
    def predicted_traffic(
        cls,
        workload: Workload,
        parameters: Sequence[LogicalParameter],
        layout: Layout,
        seats: Seats,
        options: Mapping[str, Any],
    ) -> Traffic | None:
        costs = slice_costs.slice_costs(workload, layout)
        return None if costs is None else slice_costs.traffic_of(costs, workload, layout)

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        reason = "what DTensor holds between cut layers is its own choice, of which no closed form is held here"
        return {"states": reason, "peak": reason, "bytes": "the model does not run without values"}

    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device) -> None:
        self.workload = workload
        self.device = device
        self.group = mesh.group("tensor")
        self.num_ranks = layout.tensor
        self.num_updates = 0
        self.module = workload.build_model().to(device)
        self._cut = cut(self.module, workload, mesh.device_mesh()["tensor"])
        named = dict(self.module.named_parameters())
        self.parameters = {parameter.name: named[parameter.name] for parameter in self._cut.registry}
        self._partial = [self.parameters[name] for name in self.parameters if name in self._cut.partial]
        self.locals = {name: local_part(parameter) for name, parameter in self.parameters.items()}
        groups = decay_groups(self._cut.registry, list(self.locals.values()), workload.training.weight_decay)
        self.optimizer = torch_optimizer(workload.training, groups)
        self._clip_scale: Tensor | None = None

    def train_step(self, batch: Batch) -> StepOutput:
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for tensor in (*self.parameters.values(), *self.locals.values()):
            tensor.grad = None
        with self._loss_of_parts():
            for micro_batch in batch.micro_batches:
                with phase("forward"):
                    loss = self.workload.loss_sum(self.module, micro_batch)
                    objective = loss / batch.global_num_tokens
                with phase("backward"):
                    objective.backward()
                loss_sum += local_part(loss)
                num_tokens += micro_batch.num_tokens
        with phase("reduce"):
            for parameter in self._partial:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.group)
        learning_rate = self.workload.training.learning_rate_at(self.num_updates)
        with phase("optimizer"), torch.no_grad():
            norm, skipped = self._step(learning_rate)
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=norm,
            skipped=skipped,
            learning_rates=(learning_rate,) * len(self.optimizer.param_groups),
        )

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        with evaluating(self.module), self._loss_of_parts():
            return sum_losses(
                batch, lambda micro_batch: local_part(self.workload.loss_sum(self.module, micro_batch)), self.device
            )

    def _loss_of_parts(self) -> AbstractContextManager[Any]:
        return loss_parallel() if self._cut.cuts_logits else nullcontext()

    def _step(self, learning_rate: float) -> tuple[Tensor | None, bool]:
        training = self.workload.training
        norm, self._clip_scale = None, None
        for name, parameter in self.parameters.items():
            _place_gradient(parameter)
            self.locals[name].grad = None if parameter.grad is None else local_part(parameter.grad)
        if training.checks_norm or self.tracks_gradient_norm:
            norm = self._norm()
        skipped = training.skip_nonfinite and norm is not None and not bool(torch.isfinite(norm))
        if not skipped:
            if training.clip_norm is not None and norm is not None:
                self._clip_scale = clip_coefficient(norm, training.clip_norm)
                for tensor in self.locals.values():
                    if tensor.grad is not None:
                        tensor.grad.mul_(self._clip_scale)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.num_updates += 1
        return norm, skipped

    def _norm(self) -> Tensor:
        """Replicated parameters count once, on the first rank."""
        is_first = dist.get_rank(self.group) == 0
        counted = [
            tensor.grad
            for name, tensor in self.locals.items()
            if tensor.grad is not None and (is_first or _is_cut(self.parameters[name]))
        ]
        return norm_over_ranks(global_norm(counted).to(self.device), self.group)

    def full_gradients(self) -> dict[str, Tensor]:
        scale = 1.0 if self._clip_scale is None else float(self._clip_scale)
        gradients = {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}
        return {name: self._whole(name, gradient) / scale for name, gradient in gradients.items()}

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: self._whole(name, parameter.detach()) for name, parameter in self.module.named_parameters()}

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        whole = self._gathered(tensor) if _is_cut(tensor) else local_part(tensor).cpu().clone()
        return self._cut.in_order(name, whole)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Not by full_tensor(), which remembers the groups of earlier meshes over the same ranks."""
        assert isinstance(tensor, DTensor)
        (placement,) = tensor.placements
        assert isinstance(placement, Shard)
        own = local_part(tensor).contiguous()
        pieces = []
        for rank in range(self.num_ranks):
            size, _ = Shard.local_shard_size_and_offset(tensor.shape[placement.dim], self.num_ranks, rank)
            shape = list(own.shape)
            shape[placement.dim] = size
            pieces.append(own if rank == dist.get_rank(self.group) else own.new_empty(shape))
            if pieces[rank].numel():
                dist.broadcast(pieces[rank], group=self.group, group_src=rank)
        return torch.cat(pieces, placement.dim).cpu()

    def replicated_tensors(self) -> Iterable[Tensor]:
        yield from self.locals.values()
        yield from self.module.buffers()

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return {
            "parameters": [local_part(parameter) for parameter in self.module.parameters()],
            "gradients": [tensor.grad for tensor in self.locals.values() if tensor.grad is not None],
            "optimizer_states": [value for value in states if isinstance(value, Tensor)],
        }


def _place_gradient(parameter: Tensor) -> None:
    """Torch leaves some gradients whole, or as summands, where the parameter is cut."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
