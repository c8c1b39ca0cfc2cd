"""The exchanges and layers of tensor parallelism on real ranks, held against one process; what is wrong fails the
launch."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist
from torch import Tensor

from harness.data import IGNORE_INDEX
from harness.mesh import Mesh
from harness.workload import cross_entropy_sum
from impls.native.parts import tensor_vocabulary
from impls.native.parts.direct_gradients import TrainingTask
from impls.native.parts.tensor_cut import Cut
from impls.native.parts.tensor_exchange import ProcessGroupExchange, SharedMemoryExchange, TensorExchange
from impls.native.parts.tensor_layers import CutLayer, TensorContext
from tests.impls.native.probes import Probe


class Tensors(Probe):
    """Plays the function of this file named `scenario`."""


def _ways(mesh: Mesh) -> list[TensorExchange]:
    group = mesh.group("data")
    return [ProcessGroupExchange(group), SharedMemoryExchange(group, timeout_seconds=60.0)]


def _of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def exchanges(mesh: Mesh) -> None:
    """Sums, gathers and scatters in turn, of sizes that grow, each rank held up at moments of its own."""
    group = mesh.group("data")
    rank, num_ranks = group.rank(), group.size()
    sizes = [3 - (index % 2) for index in range(num_ranks)]  # along the cut dim; they differ
    for exchange in _ways(mesh):
        moments = random.Random(rank)
        for step in range(24):
            if moments.random() < 0.3:
                time.sleep(moments.random() * 0.003)
            dtype = (torch.float32, torch.float64, torch.bfloat16)[step % 3]
            width = 1 + 40 * step
            whole = (2, sum(sizes), width)
            everyones = [_of_rank(r, whole, dtype, step) for r in range(num_ranks)]
            total = torch.stack(everyones).sum(0)
            room = exchange.room(whole, everyones[rank]).copy_(everyones[rank])
            assert torch.equal(exchange.start_sum(room)(), total), f"{type(exchange).__name__}: sum at {step}"
            start, size = sum(sizes[:rank]), sizes[rank]
            piece = exchange.start_scatter_sum(everyones[rank].clone(), 1, sizes)()
            assert torch.equal(piece, total.narrow(1, start, size)), f"{type(exchange).__name__}: scatter at {step}"
            gathered = exchange.start_gather(piece.contiguous(), 1, sizes)()
            assert torch.equal(gathered, total), f"{type(exchange).__name__}: gather at {step}"
        exchange.close()


def vocabulary(mesh: Mesh) -> None:
    """Embedding and cross-entropy over parts of a vocabulary, of which the last rank may have none."""
    group = mesh.group("data")
    rank, num_ranks = group.rank(), group.size()
    for exchange in _ways(mesh):
        for size in (51, 6, 1):
            for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
                _one_vocabulary(exchange, Cut(dim=0, size=size, degree=num_ranks), rank, dtype, tolerance)
        exchange.close()


def _one_vocabulary(exchange: TensorExchange, cut: Cut, rank: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(cut.size)
    width, shape = 5, (3, 4)
    weight = torch.randn(cut.size, width, generator=generator).to(dtype)
    indices = torch.randint(cut.size, shape, generator=generator)
    targets = torch.randint(cut.size, shape, generator=generator)
    targets[0, :2] = IGNORE_INDEX
    whole = weight.clone().requires_grad_()
    embedded = torch.nn.functional.embedding(indices, whole)
    loss = cross_entropy_sum(embedded @ whole.t() * 3, targets)
    loss.backward()

    context = TensorContext(exchange=exchange, task=TrainingTask())
    first, _ = cut.bounds(rank)
    part = cut.local(weight, rank).requires_grad_()
    ours = tensor_vocabulary.embedding(indices, part, CutLayer(context=context, first=first))
    torch.testing.assert_close(ours, embedded, rtol=tolerance, atol=tolerance)
    hidden = ours.detach().requires_grad_()
    logits = hidden @ part.t() * 3
    total = tensor_vocabulary.cross_entropy_sum(logits, targets, first, context)
    torch.testing.assert_close(total, loss, rtol=tolerance, atol=tolerance)
    total.backward()
    assert hidden.grad is not None and part.grad is not None and whole.grad is not None
    ours.backward(exchange.start_sum(hidden.grad)().clone())
    torch.testing.assert_close(part.grad, cut.local(whole.grad, rank), rtol=10 * tolerance, atol=10 * tolerance)


def one_that_does_not_come(mesh: Mesh) -> None:
    group = mesh.group("data")
    exchange = SharedMemoryExchange(group, timeout_seconds=0.3)
    own = torch.ones(4)
    exchange.start_sum(own)()
    if group.rank() == 0:
        try:
            exchange.start_sum(own)()
        except TimeoutError as error:
            assert str(error) == ("shared memory: rank 0 waited 0.3 s for rank 1 to have published its activations"), (
                str(error)
            )
        else:
            raise AssertionError("expected TimeoutError")
    dist.barrier(group=group)
    exchange.close()
