"""What replicas send to each other in a step, from rank to rank."""

from __future__ import annotations

import torch

from harness import traffic
from harness.layout import Layout
from harness.placement import Seats
from harness.traffic import Traffic
from harness.workload import Workload
from impls.native.parts import hierarchy
from impls.native.parts.hierarchy import Hierarchical
from impls.native.parts.synchronised_batch_norm import summed_bytes

_CPU = torch.device("cpu")


def replica_traffic(
    gradient_bytes: int, workload: Workload, layout: Layout, seats: Seats, hierarchical: Hierarchical
) -> Traffic:
    """Along the data axis: the sum of so many bytes of gradients, those of synchronised BatchNorm, and the first rank's
    buffers."""
    is_hierarchical = hierarchy.is_chosen(hierarchical, layout, seats, "data", _CPU)
    statistics = 0
    if workload.synchronise_batch_norm:
        statistics = workload.training.num_micro_batches * summed_bytes(workload, layout.data)
    parts = []
    for ranks in layout.groups("data"):
        if is_hierarchical:
            parts.append(hierarchy.all_reduce_traffic(seats.by_node(ranks), gradient_bytes))
        else:
            parts.append(traffic.all_reduce(ranks, gradient_bytes))
        parts.append(traffic.all_reduce(ranks, statistics))
        parts.append(traffic.tree(ranks, 0, workload.buffer_bytes()))
    return traffic.total(parts)
