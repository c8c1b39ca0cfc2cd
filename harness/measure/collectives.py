"""One collective after another, timed on one rank: the same code over gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from harness.link_table import Operation

_WARM_UP = 2


def collective_seconds(
    operation: Operation, payload_bytes: int, num_repeats: int, *, control: dist.ProcessGroup, device: torch.device
) -> list[float]:
    """Seconds of each of `num_repeats` operations over all ranks, after two that do not count. Before each, ranks meet
    in `control`. The payload is rounded up to whole fp32 numbers for each rank."""
    carry_out = _prepared(operation, payload_bytes, device)
    seconds = []
    for _ in range(_WARM_UP + num_repeats):
        dist.barrier(group=control)
        began = time.perf_counter()
        carry_out()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[_WARM_UP:]


def _prepared(operation: Operation, payload_bytes: int, device: torch.device) -> Callable[[], object]:
    """The operation on memory of its own."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    each = max(1, -(-payload_bytes // (4 * num_ranks)))
    whole, part = torch.zeros(num_ranks * each, device=device), torch.zeros(each, device=device)
    if operation == "all_reduce":
        return partial(dist.all_reduce, whole)
    if operation == "all_gather":
        return partial(dist.all_gather_single, whole, part)
    if operation == "reduce_scatter":
        return partial(dist.reduce_scatter_single, part, whole)
    if operation == "all_to_all":
        return partial(dist.all_to_all_single, torch.zeros_like(whole), whole)
    received, right, left = torch.zeros_like(whole), (rank + 1) % num_ranks, (rank - 1) % num_ranks

    def send_and_receive() -> None:
        messages = [dist.P2POp(dist.isend, whole, right), dist.P2POp(dist.irecv, received, left)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    return send_and_receive
