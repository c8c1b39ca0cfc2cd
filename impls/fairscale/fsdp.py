"""FairScale's FullyShardedDataParallel: each rank holds a shard of every parameter, gradient and moment, and gathers a
block's parameters while it computes with them (ZeRO stage 3: Rajbhandari et al. 2020, "ZeRO")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.evaluation import evaluating, sum_losses
from harness.implementation import DryStep, EvaluationOutput, Implementation, Prediction, StepOutput, phase
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer, global_norm, norm_over_ranks
from harness.parameters import LogicalParameter, MemoryCategory, logical_parameters
from harness.workload import Batch, Workload
from impls.fairscale.parts import fully_sharded_costs, library
from impls.fairscale.parts.first_ranks_buffers import broadcast_buffers


class FairScaleFullySharded(Implementation):
    """Needs CUDA streams. Each block is a unit, the rest of the model the root, which stays gathered; parameters are
    sharded one by one, since a flat one could not decay in some of its elements only. `reshard_after_forward=False`
    keeps blocks gathered until their backward. It averages over ranks, so each rank's loss is multiplied by their
    number.

    No run on a GPU has been held against what it predicts: only FairScale's own code with its streams taken out, on a
    CPU.
    """

    strategy = "zero_3"
    libraries = ("fairscale",)

    @classmethod
    def comparable_strategies(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        return ("zero_3",) if options.get("reshard_after_forward", True) else ("zero_3", "zero_2")

    @classmethod
    def unavailable(cls) -> str | None:
        return library.why_unavailable()

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if (layout.tensor, layout.pipeline) != (1, 1) or layout.shard not in (None, layout.data):
            return f"FullyShardedDataParallel takes a data degree and shards over all of it, got {layout}"
        if workload.precision.name != "fp32" or workload.fixed_dtypes:
            return f"FullyShardedDataParallel takes parameters in fp32, got {_dtypes(workload)}"
        return (
            _why_not_parameters(workload)
            or workload.fits_data_degree(layout.data)
            or (_why_not_cpu() if device.type == "cpu" else None)
        )

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return fully_sharded_costs.memory_bytes(workload, parameters, layout.data)

    @classmethod
    def predicted_wire_bytes(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> int | None:
        reshards = options.get("reshard_after_forward", True)
        return fully_sharded_costs.sent_bytes(workload, parameters, layout, reshards=reshards)

    @classmethod
    def dry_steps(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Sequence[Callable[[nn.Module], DryStep]]:
        """What is gathered comes and goes as streams get to it."""
        return ()

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        return {"peak": "what is gathered at a time depends on CUDA streams, and has never been measured"}

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        reshard_after_forward: bool = True,
    ) -> None:
        from fairscale.nn.data_parallel import FullyShardedDataParallel

        self.workload = workload
        self.data_degree = layout.data
        self.device = device
        self.group = mesh.group("data")
        settings = {
            "process_group": self.group,
            "process_group_reduce_scatter": mesh.group("data", lane=1),
            "reshard_after_forward": reshard_after_forward,
            "flatten_parameters": False,
            "compute_device": device,
        }
        model = workload.build_model().to(device)
        if workload.synchronise_batch_norm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model, self.group)
        self.parameters = dict(model.named_parameters())  # the same objects once they are sharded
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self.replicas = list(model.buffers())
        names = {id(module): name for name, module in model.named_modules()}
        for block in workload.blocks(model):
            if block is not model and any(True for _ in block.parameters()):
                model.set_submodule(names[id(block)], FullyShardedDataParallel(block, **settings))
        self.module = FullyShardedDataParallel(model, **settings)
        # Decay goes by whole shapes: those of the model before it was sharded.
        self.optimizer = RecipeOptimizer(workload.model_without_memory(), workload, stepped=self.parameters)

    def train_step(self, batch: Batch) -> StepOutput:
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        self.optimizer.clear_gradients()
        for micro_batch in batch.micro_batches:
            with phase("forward"):
                loss = self.workload.loss_sum(self.module, micro_batch)
            with phase("backward"):
                (loss * (self.data_degree / batch.global_num_tokens)).backward()
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        with phase("optimizer"):
            update = self.optimizer.step(tracks_norm=self.tracks_gradient_norm, norm_of=self._norm)
        broadcast_buffers(self.replicas, self.group)  # FullyShardedDataParallel leaves them alone
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=update.gradient_norm,
            skipped=update.skipped,
            learning_rates=update.learning_rates,
        )

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        with evaluating(self.module):
            return sum_losses(batch, partial(self.workload.loss_sum, self.module), self.device)

    def _norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Of all shards; what pads them is zero."""
        return norm_over_ranks(global_norm(list(gradients.values())).to(self.device), self.group)

    def full_gradients(self) -> dict[str, Tensor]:
        return {name: self._whole(name, gradient) for name, gradient in self.optimizer.unclipped_gradients().items()}

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: self._whole(name, parameter.detach()) for name, parameter in self.parameters.items()}

    def _whole(self, name: str, shard: Tensor) -> Tensor:
        """Shards one after another, without what pads the last ones, in the parameter's shape. Collective."""
        shape = self.shapes[name]
        own = shard.to(self.device).flatten()
        if self.data_degree > 1:
            pieces = [torch.empty_like(own) for _ in range(self.data_degree)]
            dist.all_gather(pieces, own, group=self.group)
            own = torch.cat(pieces)
        return own[: shape.numel()].view(shape).cpu().clone()

    def full_buffers(self) -> dict[str, Tensor]:
        cleaned = ((name.replace("_fsdp_wrapped_module.", ""), buffer) for name, buffer in self.module.named_buffers())
        return {name.replace("_fpw_module.", ""): buffer.detach().cpu().clone() for name, buffer in cleaned}

    def replicated_tensors(self) -> Iterable[Tensor]:
        yield from self.replicas

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.parameters.values(),
            "gradients": self.optimizer.live_gradients(),
            "optimizer_states": self.optimizer.state_tensors(),
        }


def _why_not_cpu() -> str | None:
    reason = library.why_not_fully_sharded_on_cpu()
    return reason and f"FullyShardedDataParallel needs CUDA streams; on a CPU: {reason}"


def _why_not_parameters(workload: Workload) -> str | None:
    if workload.leaves_parameters_unused:
        return "FullyShardedDataParallel expects a gradient of every parameter on every rank"
    model = workload.model_without_memory()
    blocks = fully_sharded_costs.block_prefixes(workload, model)
    for parameter in logical_parameters(model):
        users = {
            next((block for block in blocks if name.startswith(block)), "")
            for name in (parameter.name, *parameter.aliases)
        }
        if len(users) > 1:
            return f"FullyShardedDataParallel shards a parameter in one unit, {parameter.name} is used in several"
        if parameter.num_elements == 0:
            return f"FullyShardedDataParallel gathers no parameter without elements, {parameter.name} has none"
    return None


def _dtypes(workload: Workload) -> str:
    return "several dtypes" if workload.fixed_dtypes else workload.precision.name
