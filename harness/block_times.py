"""How long each block of a chain takes for one micro-batch, forward and backward, on the device at hand. Builds the
whole model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from harness.chain import Chain, as_received, as_value, chain_of, reasons, run_block
from harness.workload import MicroBatch, Workload

NUM_ROUNDS = 7
NUM_WARM_UP_ROUNDS = 3
_HOW = "as a stage of its own"


def block_seconds(workload: Workload, device: torch.device) -> tuple[float, ...]:
    """Of each block the median over some rounds through the whole chain, the last one's loss included, for the first
    micro-batch. NoChain where the workload has none, or a block cannot be run apart from the others."""
    chain = chain_of(workload, lambda: workload.build_model().to(device))
    micro_batch = workload.batch(0).to(device).micro_batches[0]
    rounds = [_round(workload, chain, micro_batch, device) for _ in range(NUM_WARM_UP_ROUNDS + NUM_ROUNDS)]
    return tuple(median(of_block) for of_block in zip(*rounds[NUM_WARM_UP_ROUNDS:], strict=True))


def _round(workload: Workload, chain: Chain, micro_batch: MicroBatch, device: torch.device) -> list[float]:
    """Seconds of each block, all of them cut from each other as if each were a stage."""
    seconds = [0.0] * len(chain.blocks)

    @contextmanager
    def timed(index: int) -> Iterator[None]:
        begin = _now(device)
        yield
        seconds[index] += _now(device) - begin

    inputs, outputs = [[micro_batch.inputs]], []
    for index in range(len(chain.blocks)):
        with timed(index):
            outputs.append(run_block(chain, index, inputs[index], _HOW))
        inputs.append(as_received(outputs[index]))
    last = len(chain.blocks) - 1
    with timed(last), reasons("pipeline: the loss cannot be computed"):
        outputs[last] = [workload.loss(as_value(outputs[last]), micro_batch.targets)]
    for index in range(last, -1, -1):
        received = [None] if index == last else [tensor.grad for tensor in inputs[index + 1]]
        with timed(index), reasons(f"pipeline: {chain.names[index]} cannot be run backward {_HOW}"):
            _go_backward(outputs[index], received)
    return seconds


def _go_backward(outputs: Sequence[Tensor], received: Sequence[Tensor | None]) -> None:
    """An output that nobody has used gets no gradient; a scalar's own is one."""
    pairs = [(own, gradient) for own, gradient in zip(outputs, received, strict=True) if own.requires_grad]
    used = [(own, gradient) for own, gradient in pairs if gradient is not None or not own.ndim]
    if used:
        torch.autograd.backward([own for own, _ in used], [gradient for _, gradient in used])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
