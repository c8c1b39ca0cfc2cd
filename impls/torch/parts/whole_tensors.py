"""Sharded tensors made whole again, for comparisons and never while training.

DTensor has full_tensor() for this. It remembers the groups of earlier meshes over the same ranks, which are gone where
one process trains one model after another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, in the same memory."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local().detach()


def whole(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """What fully_shard has cut over `group`, on the CPU; one collective for each dtype."""
    result = {}
    num_shards = dist.get_world_size(group)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        alike = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
        shards = [_padded(tensor, num_shards) for tensor in alike.values()]
        flat = torch.cat([shard.flatten() for shard in shards])
        of_all = flat.new_empty(num_shards, len(flat))
        dist.all_gather_into_tensor(of_all.view(-1), flat, group=group)
        columns = of_all.split([shard.numel() for shard in shards], dim=1)
        for (name, tensor), shard, column in zip(alike.items(), shards, columns, strict=True):
            rows = column.reshape(num_shards * len(shard), *shard.shape[1:])
            result[name] = rows[: tensor.shape[0]].cpu().clone()
    return result


def _padded(tensor: Tensor, num_shards: int) -> Tensor:
    """This rank's shard, with rows of zeros until it is as long as the first rank's."""
    shard = local(tensor)
    num_missing = -(-tensor.shape[0] // num_shards) - len(shard)
    return torch.cat([shard, shard.new_zeros(num_missing, *shard.shape[1:])])
