"""FairScale's Pipe: one process drives all partitions of a sequence of blocks and cuts each micro-batch into chunks
(Kim et al. 2020, "torchgpipe"; GPipe's schedule: Huang et al. 2019).

    clock        0      1      2      3
    partition 0  chunk 0  chunk 1  chunk 2
    partition 1         chunk 0  chunk 1  chunk 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from harness import chain
from harness.evaluation import evaluating, sum_losses
from harness.implementation import (
    DryStep,
    EvaluationOutput,
    Implementation,
    Prediction,
    Preparation,
    StepOutput,
    lending,
    phase,
)
from harness.layout import Layout
from harness.mesh import Mesh
from harness.optimizer import RecipeOptimizer
from harness.parameters import LogicalParameter, MemoryCategory, replicated_state_bytes
from harness.stage_costs import stages_of
from harness.workload import Batch, Workload
from impls.fairscale.parts import library

Checkpoint = Literal["never", "except_last", "always"]
Partition = Literal["uniform", "parameters", "flops"]


class FairScalePipe(Implementation):
    """A rank has one device, so that all `num_partitions` lie on it and take turns: a row shows what Pipe's chunks,
    copies and its thread cost, not what they would hide on several devices. `chunks` is how many pieces each
    micro-batch is cut into; `checkpoint` which of them are computed again in backward (Pipe's own default is
    except_last); `partition` what partitions have alike."""

    strategy = "pipeline_parallel"
    libraries = ("fairscale",)
    makes_gradients = True

    @classmethod
    def unavailable(cls) -> str | None:
        return library.why_unavailable()

    @classmethod
    def refused_options(cls, options: Mapping[str, Any]) -> str | None:
        for name, default in (("num_partitions", 2), ("chunks", 4)):
            if (number := int(options.get(name, default))) < 1:
                return f"{name} must be at least 1, got {number}"
        for name, known in (("checkpoint", get_args(Checkpoint)), ("partition", get_args(Partition))):
            if (value := options.get(name, known[0])) not in known:
                return f"{name} must be one of {', '.join(known)}, got {value!r}"
        return None

    @classmethod
    def unsupported(
        cls, workload: Workload, layout: Layout, device: torch.device, options: Mapping[str, Any]
    ) -> str | None:
        if layout.world_size != 1:
            return f"Pipe drives all partitions from one process, on whose one device they lie: one rank, got {layout}"
        if workload.uses_random_numbers:
            return "Pipe runs blocks on a thread of its own, chunk by chunk, which draws other random numbers"
        as_it_is = options.get("chunks", 4) == 1 and options.get("checkpoint", "never") == "never"
        if workload.depends_on_chunks and not as_it_is:
            return "statistics of a chunk are not those of its micro-batch, and a forward computed again adds to them"
        if reason := chain.why_not(workload, options.get("num_partitions", 2)):
            return reason
        blocks = chain.chain_of(workload).blocks
        return None if len(set(blocks)) == len(blocks) else "Pipe takes each block once, the chain names one twice"

    @classmethod
    def predicted_memory(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[MemoryCategory, int] | None:
        return replicated_state_bytes(parameters, workload.precision, workload.training.num_moments)

    @classmethod
    def dry_run_preparation(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Preparation:
        prepare = super().dry_run_preparation(workload, parameters, layout, options)
        return partial(_with_last_chunk, prepare=prepare, chunks=options.get("chunks", 4))

    @classmethod
    def dry_steps(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Sequence[Callable[[nn.Module], DryStep]] | None:
        return () if _computes_again(options) else None

    @classmethod
    def unpredicted(
        cls, workload: Workload, parameters: Sequence[LogicalParameter], layout: Layout, options: Mapping[str, Any]
    ) -> Mapping[Prediction, str]:
        return {"peak": "what Pipe computes again, and when, is its own"} if _computes_again(options) else {}

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: torch.device,
        *,
        num_partitions: int = 2,
        chunks: int = 4,
        checkpoint: Checkpoint = "never",
        partition: Partition = "flops",
    ) -> None:
        from fairscale.nn.pipe import Pipe

        options = {"num_partitions": num_partitions, "chunks": chunks, "checkpoint": checkpoint, "partition": partition}
        if reason := self.refused_options(options):
            raise ValueError(f"fairscale.pipe: {reason}")
        self.workload = workload
        self.device = device
        built = chain.chain_of(workload, workload.build_model)
        self.module = built.model.to(device)
        self.balance = [len(blocks) for blocks in stages_of(workload, num_partitions, partition, in_flight=())]
        self.pipe = Pipe(
            nn.Sequential(*built.blocks),
            self.balance,
            devices=[device] * num_partitions,
            chunks=chunks,
            checkpoint=checkpoint,
        )
        self.optimizer = RecipeOptimizer(self.module, workload)
        if workload.precision.master is not None:
            for parameter in self.optimizer.parameters:
                parameter.grad_dtype = workload.precision.gradient

    def train_step(self, batch: Batch) -> StepOutput:
        loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        self.optimizer.clear_gradients()
        for micro_batch in batch.micro_batches:
            with phase("forward"):
                loss = self.workload.loss_sum(self.pipe, micro_batch)
            with phase("backward"):
                (loss / batch.global_num_tokens).backward()
            loss_sum += loss.detach()
            num_tokens += micro_batch.num_tokens
        with phase("optimizer"):
            update = self.optimizer.step(tracks_norm=self.tracks_gradient_norm)
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            gradient_norm=update.gradient_norm,
            skipped=update.skipped,
            learning_rates=update.learning_rates,
        )

    def evaluate(self, batch: Batch) -> EvaluationOutput:
        with evaluating(self.module, self.pipe):
            return sum_losses(batch, partial(self.workload.loss_sum, self.pipe), self.device)

    def full_gradients(self) -> dict[str, Tensor]:
        return self.optimizer.unclipped_gradients()

    def full_parameters(self) -> dict[str, Tensor]:
        return self.optimizer.full_parameters(self.module)

    def facts(self) -> Mapping[str, str]:
        return {"balance": " ".join(map(str, self.balance))}

    def memory_tensors(self) -> dict[MemoryCategory, Iterable[Tensor]]:
        return {
            "parameters": self.module.parameters(),
            "gradients": self.optimizer.live_gradients(),
            "optimizer_states": self.optimizer.state_tensors(),
        }

    def close(self) -> None:
        """Its thread ends with it."""
        del self.pipe


def _computes_again(options: Mapping[str, Any]) -> bool:
    return bool(options.get("checkpoint", "never") != "never")


def _with_last_chunk(
    model: nn.Module, gradients: Mapping[str, Tensor], *, prepare: Preparation, chunks: int
) -> Callable[[Tensor], None]:
    """Chunks' outputs are put together in one tensor; Pipe's thread holds on to the last one until its next task."""
    held: list[Tensor] = []

    def hold(module: nn.Module, inputs: Any, output: Tensor) -> None:
        with lending("communication_buffers"):  # no activation: it outlives the step
            held.append(torch.empty_like(output.chunk(chunks)[-1]))

    model.register_forward_hook(hold)
    return prepare(model, gradients)
