"""Scenes that are played on real ranks: an implementation that trains nothing and checks something while it is built.
What it finds wrong fails the launch, with the rank's traceback."""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.implementation import Implementation, StepOutput
from harness.layout import Layout
from harness.mesh import Mesh
from harness.workload import Batch, Workload
from impls.native.parts.bucket_sums import BucketSums, ProcessGroupSums, SharedMemorySums
from impls.native.parts.buffer_broadcasts import BufferBroadcasts
from impls.native.parts.collectives import parameter_server_all_reduce, ring_all_reduce
from impls.native.parts.shared_memory import SharedBuffers
from impls.native.parts.synchronised_batch_norm import synchronise_batch_norm

CPU = torch.device("cpu")


class Probe(Implementation):
    """Plays the function named `scenario` of the file its class stands in."""

    strategy = "none"

    def __init__(self, workload: Workload, layout: Layout, mesh: Mesh, device: torch.device, *, scenario: str) -> None:
        self.module = nn.Identity()
        getattr(sys.modules[type(self).__module__], scenario)(mesh)
        dist.barrier(group=mesh.group("data"))

    def train_step(self, batch: Batch) -> StepOutput:
        raise NotImplementedError

    def full_gradients(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def full_parameters(self) -> dict[str, Tensor]:
        raise NotImplementedError


def of_rank(rank: int, num_elements: int, dtype: torch.dtype, step: int = 0) -> Tensor:
    """Whole numbers that bf16 holds and whose sums over four ranks it holds too."""
    return ((torch.arange(num_elements) * 7 + 5 * rank + step) % 31 - 15).to(dtype)


def total(num_ranks: int, num_elements: int, dtype: torch.dtype, step: int = 0) -> Tensor:
    return torch.stack([of_rank(rank, num_elements, dtype, step) for rank in range(num_ranks)]).sum(0)


def composed_collectives(mesh: Mesh) -> None:
    group = mesh.group("data")
    for collective in (ring_all_reduce, parameter_server_all_reduce):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for num_elements in (0, 1, 2, 3, 5, 1000, 100_003):
                buffer = of_rank(group.rank(), num_elements, dtype)
                collective(buffer, group)
                assert torch.equal(buffer, total(group.size(), num_elements, dtype)), (
                    f"{collective.__name__} of {num_elements} {dtype} on rank {group.rank()}"
                )


def bucket_sums(mesh: Mesh) -> None:
    group = mesh.group("data")
    shapes = [(7, torch.float64), (0, torch.float32), (100_003, torch.float32), (33, torch.bfloat16)]
    ways: list[Callable[[], BucketSums]] = [
        lambda: ProcessGroupSums(shapes, group, CPU),
        lambda: ProcessGroupSums(shapes, group, CPU, partial(ring_all_reduce, group=group)),
        lambda: ProcessGroupSums(shapes, group, CPU, partial(parameter_server_all_reduce, group=group)),
        lambda: SharedMemorySums(SharedBuffers(shapes, group, timeout_seconds=60.0)),
    ]
    for way in ways:
        sums = way()
        for step in range(4):
            _sum_all(sums, shapes, group, step, collects=step % 2 == 1)
        sums.close()


def _sum_all(
    sums: BucketSums, shapes: list[tuple[int, torch.dtype]], group: dist.ProcessGroup, step: int, *, collects: bool
) -> None:
    for index, (num_elements, dtype) in enumerate(shapes):
        sums.reclaim(index)
        sums.own(index).copy_(of_rank(group.rank(), num_elements, dtype, step))
        sums.start(index)
        sums.progress()
    for index, (num_elements, dtype) in enumerate(shapes):
        expected = total(group.size(), num_elements, dtype, step)
        pieces = sums.wait(index)
        covered = 0
        for start, stop, values in pieces:
            assert start == covered, "pieces are adjacent and in order"
            assert torch.equal(values, expected[start:stop]), f"{type(sums).__name__}: bucket {index} at step {step}"
            covered = stop
        assert covered == num_elements
        if collects:
            sums.collect(index)
            assert torch.equal(sums.own(index), expected)
        else:
            sums.release(index)


class ManyBuffers(nn.Module):
    """Buffers of all sorts; `fill` gives each of them, in the place where it is, values that only this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("low", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wide", torch.zeros((), dtype=torch.float64))
        self.register_buffer("table", torch.zeros(2, 3).t())
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("large", torch.zeros(20_000))
        self.register_buffer("large_table", torch.zeros(100, 200).t())
        self.register_buffer("absent", None)
        self.inner = nn.BatchNorm1d(7)
        self.register_buffer("alias", self.inner.running_mean)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.buffers():
            buffer.copy_(torch.randint(-9, 9, buffer.shape, generator=generator))


def buffer_broadcasts(mesh: Mesh) -> None:
    """Step after step the first rank's values arrive in every rank's own buffers, new ones too; the small ones of all
    dtypes in one collective."""
    group = mesh.group("data")
    model, first = ManyBuffers(), ManyBuffers()
    broadcasts = BufferBroadcasts(model, group)
    sizes: list[int] = []
    send = broadcasts._send

    def counted(tensor: Tensor) -> None:
        sizes.append(tensor.nbytes)
        send(tensor)

    broadcasts._send = counted  # type: ignore[method-assign]
    for step in range(4):
        sizes.clear()
        if step == 2:
            for module in (model, first):
                module.count = module.count + 1
                module.mean = torch.zeros(2, 2)  # of another shape
                module.low = None
        model.fill(100 * step + group.rank())
        first.fill(100 * step)
        before = dict(model.named_buffers())
        broadcasts.broadcast()
        assert sorted(sizes) == sorted([sum(b.nbytes for b in model.buffers()) - 80_000, 80_000])
        after = dict(model.named_buffers())
        for name, right in first.named_buffers():
            assert after[name] is before[name]
            assert torch.equal(after[name], right), f"{name} at step {step} on rank {group.rank()}"
    BufferBroadcasts(nn.Linear(2, 2), group).broadcast()  # there are none


def shared_memory_stress(mesh: Mesh) -> None:
    """Steps back to back, each rank held up at moments of its own."""
    group = mesh.group("data")
    rank = group.rank()
    shapes = [(50_000, torch.float32), (3, torch.float32), (0, torch.float32), (1001, torch.float64)]
    buffers = SharedBuffers(shapes, group, timeout_seconds=60.0)
    moments = random.Random(rank)

    def dawdle() -> None:
        if moments.random() < 0.2:
            time.sleep(moments.random() * 0.004)

    for step in range(40):
        for index, (num_elements, dtype) in enumerate(shapes):
            dawdle()
            buffers.reclaim(index)
            buffers.own(index).copy_(of_rank(rank, num_elements, dtype, step))
            buffers.publish(index)
        for index, (num_elements, dtype) in enumerate(shapes):
            buffers.wait(index)
            dawdle()
            expected = total(group.size(), num_elements, dtype, step)
            for start, stop, values in buffers.sums(index):
                assert torch.equal(values, expected[start:stop]), f"step {step}, buffer {index}"
            buffers.release(index)
    buffers.close()


def shared_memory_lack(mesh: Mesh) -> None:
    """One rank has no memory: every rank says so, and which."""
    group = mesh.group("data")
    enough = os.posix_fallocate

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        if group.rank() == 1:
            os.posix_fallocate = refuse
        SharedBuffers([(1000, torch.float32)], group, timeout_seconds=60.0)
    except MemoryError as error:
        assert "rank 1 needs 8128 bytes for its gradients: No space left on device" in str(error), str(error)
    else:
        raise AssertionError("expected MemoryError")
    finally:
        os.posix_fallocate = enough


def synchronised_batch_norm(mesh: Mesh) -> None:
    """Unlike shares, an empty one among them, against one BatchNorm over the union."""
    group = mesh.group("data")
    for shares in ([3, 5, 1], [0, 2, 2], [4, 0, 0]):
        _one_batch_norm(group, shares, torch.float64, 1e-12, momentum=0.1)
    _one_batch_norm(group, [2, 1, 4], torch.float64, 1e-12, momentum=None)
    _one_batch_norm(group, [150, 300, 75], torch.bfloat16, 2e-2, momentum=0.1)  # 525 is no bf16 number


def _one_batch_norm(
    group: dist.ProcessGroup, shares: list[int], dtype: torch.dtype, tolerance: float, *, momentum: float | None
) -> None:
    shares = shares[: group.size()]
    generator = torch.Generator().manual_seed(sum(shares))
    union = torch.randn(sum(shares), 3, 2, 2, generator=generator).add_(3.0).to(dtype)
    weights = torch.randn(union.shape, generator=generator).to(dtype)
    bounds = (sum(shares[: group.rank()]), sum(shares[: group.rank() + 1]))

    def made() -> nn.BatchNorm2d:
        norm = nn.BatchNorm2d(3, momentum=momentum)
        nn.init.uniform_(norm.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(7))
        return norm.to(dtype)

    one, ours = made(), made()
    synchronise_batch_norm(ours, group)
    whole = union.clone().requires_grad_()
    part = union[slice(*bounds)].clone().requires_grad_()
    for _ in range(2):
        expected, output = one(whole), ours(part)
    (expected * weights).sum().backward()
    (output * weights[slice(*bounds)]).sum().backward()
    assert whole.grad is not None
    assert part.grad is not None
    assert output.dtype is dtype

    def close(actual: Tensor, right: Tensor) -> None:
        torch.testing.assert_close(
            actual, right, rtol=tolerance, atol=tolerance * max(1.0, float(right.abs().max())) if right.numel() else 0
        )

    close(output, expected[slice(*bounds)])
    close(part.grad, whole.grad[slice(*bounds)])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        close(ours.get_buffer(name), one.get_buffer(name))
    for name, right in one.named_parameters():
        gradient = ours.get_parameter(name).grad
        assert gradient is not None and right.grad is not None
        gradient = gradient.double()
        dist.all_reduce(gradient, group=group)
        close(gradient, right.grad.double())
    assert torch.equal(ours.eval()(union), nn.BatchNorm2d.forward(ours, union)), "evaluation exchanges nothing"
