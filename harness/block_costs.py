"""What each block of a chain costs for one micro-batch, found without the memory to hold it: a forward and a backward
on tensors without values, as the dry run of the memory instrument.

    activations kept    what a block's forward makes that is alive when the whole forward has ended
    FLOPs               two a multiplication with addition in matrix products, convolutions and attention (whose masked
                        half counts as well), nothing else: torch.utils.flop_counter; recomputation is backward's
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from harness.chain import Border, Chain, TensorShape, as_value, chain_of, reasons, run_block
from harness.measure.predicted_memory import LiveStorages, fake_model
from harness.parameters import LogicalParameter, logical_parameters
from harness.workload import MicroBatch, Workload

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """One block. `parameters` are all that it uses, a tied one under its first name in the model. `border` is what the
    next block gets, of the last one nothing; `kept_bytes` are those of its activations that wait for backward, and
    `unkept_border_bytes` those of the border that nobody but a stage that ends here keeps."""

    name: str
    kind: str
    parameters: tuple[LogicalParameter, ...]
    border: Border
    kept_bytes: int
    unkept_border_bytes: int
    forward_flops: int
    backward_flops: int

    @property
    def num_parameters(self) -> int:
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def border_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.border)

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops


def analyse(workload: Workload) -> tuple[BlockCosts, ...]:
    """The blocks of the workload's chain, for the largest micro-batch of its first step. NoChain where it has none, or
    a block cannot be run without values."""
    micro_batch = max(workload.batch(0).micro_batches, key=lambda one: one.inputs.numel())
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        chain = chain_of(workload, lambda: fake_model(workload, _CPU))
        return _Pass(workload, chain).run(micro_batch)


class _Pass:
    """One micro-batch through a chain and back, and what was counted on the way, block by block."""

    def __init__(self, workload: Workload, chain: Chain) -> None:
        self._workload, self._chain = workload, chain
        self._flops = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        self._borders: list[Border] = []
        self._border_storages: list[list[ref[UntypedStorage]]] = []
        self._forward: list[int] = []
        self._backward_begins: dict[int, int] = {}

    def run(self, micro_batch: MicroBatch) -> tuple[BlockCosts, ...]:
        inputs, targets = (torch.zeros_like(t, device=_CPU) for t in (micro_batch.inputs, micro_batch.targets))
        apart = [*self._chain.model.parameters(), *self._chain.model.buffers(), inputs, targets]
        with self._flops, LiveStorages(apart) as live:
            loss = self._go_forward(inputs, targets, live)
            kept, unkept = dict(live.bytes_of), [self._unkept(index) for index in range(len(self._borders))]
            with reasons("pipeline: the chain cannot be run backward without values"):
                loss.backward()
        backward = self._backward_flops()
        return tuple(
            BlockCosts(
                name=self._chain.names[index],
                kind=type(block).__name__,
                parameters=parameters,
                border=self._borders[index],
                kept_bytes=kept.get(index, 0),
                unkept_border_bytes=unkept[index],
                forward_flops=self._forward[index],
                backward_flops=backward[index],
            )
            for index, (block, parameters) in enumerate(
                zip(self._chain.blocks, _parameters(self._workload, self._chain), strict=True)
            )
        )

    def _go_forward(self, inputs: Tensor, targets: Tensor, live: LiveStorages) -> Tensor:
        handed = [inputs]
        for index in range(len(self._chain.blocks)):
            live.owner = index
            before = self._counted()
            handed = run_block(self._chain, index, handed)
            self._forward.append(self._counted() - before)
            if index + 1 < len(self._chain.blocks):
                self._note_border(index, handed)
        self._borders.append(())
        self._border_storages.append([])
        with reasons("pipeline: the loss cannot be computed without values"):
            loss = self._workload.loss(as_value(handed), targets)
        self._backward_begins[len(self._chain.blocks) - 1] = self._counted()
        return loss

    def _note_border(self, index: int, handed: list[Tensor]) -> None:
        self._borders.append(tuple(map(TensorShape.of, handed)))
        self._border_storages.append([ref(tensor.untyped_storage()) for tensor in handed])
        for tensor in handed:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._backward_begins.update({index: self._counted()}))

    def _unkept(self, index: int) -> int:
        pairs = zip(self._borders[index], self._border_storages[index], strict=True)
        return sum(tensor.num_bytes for tensor, storage in pairs if storage() is None)

    def _backward_flops(self) -> list[int]:
        """Backward comes to the blocks one after another, the last first; to those before any gradient never."""
        flops, end = [0] * len(self._chain.blocks), self._counted()
        for index in sorted(self._backward_begins):
            flops[index] = end - self._backward_begins[index]
            end = self._backward_begins[index]
        return flops

    def _counted(self) -> int:
        return int(self._flops.get_total_flops())


def _parameters(workload: Workload, chain: Chain) -> list[tuple[LogicalParameter, ...]]:
    """Of each block, described as in the whole model."""
    described = {parameter.name: parameter for parameter in logical_parameters(chain.model, workload.decays)}
    names = {id(parameter): name for name, parameter in chain.model.named_parameters()}
    return [tuple(described[names[id(parameter)]] for parameter in block.parameters()) for block in chain.blocks]


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


# torch counts the kernels of GPUs alone.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
