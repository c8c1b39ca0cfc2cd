"""What an engine's ranks hold, put together by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch import Tensor, nn


def whole_gradients(trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Between the last backward of a step and its update, on the CPU. Collective."""
    from deepspeed.utils import safe_get_full_grad

    found = {name: safe_get_full_grad(parameter) for name, parameter in trained.items()}
    return {name: gradient.detach().cpu().clone() for name, gradient in found.items() if gradient is not None}


def whole_parameters(
    model: nn.Module, trained: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The masters where there are any, on the CPU: `masters`, where each rank has them whole. Collective."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in model.named_parameters():
        if name in masters:
            value = masters[name]
        elif name in trained and (master := safe_get_full_fp32_param(parameter)) is not None:
            value = master
        else:
            with GatheredParameters([parameter]):  # as it is, where it is not sharded
                value = parameter.detach().cpu().clone()
        found[name] = value.detach().cpu().clone()
    return found


def broadcast_buffers(buffers: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """The first rank's win. Collective."""
    for buffer in buffers:
        sent = buffer.contiguous()  # a collective takes a buffer's memory for its elements in order
        dist.broadcast(sent, group=group, group_src=0)
        if sent is not buffer:
            buffer.copy_(sent)
