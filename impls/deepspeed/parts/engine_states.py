"""The tensors an engine keeps on this rank between steps, by category; each of its optimizers keeps them elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from harness.parameters import MemoryCategory

_MASTERS = (
    "fp32_groups",  # bf16 without ZeRO
    "single_partition_of_fp32_groups",  # stages 1 and 2
    "fp32_groups_flat_partition",  # stage 1 with fp32 gradients
    "fp32_partitioned_groups_flat",  # stage 3
)
_GRADIENTS = ("fp32_groups_gradients_flat", "grad_partitions_flat_buffer")


def engine_states(engine: Any, optimizer: Optimizer) -> dict[MemoryCategory, Iterable[Tensor]]:
    """`optimizer` is torch's, or whatever was given to the engine."""
    parameters = list(engine.module.parameters())
    shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    moments = (value for state in optimizer.state.values() for value in state.values())
    return {
        "parameters": [*parameters, *shards],
        "gradients": [*gradients, *_listed(engine.optimizer, _GRADIENTS)],
        "optimizer_states": [
            *_listed(engine.optimizer, _MASTERS),
            *(value for value in moments if isinstance(value, Tensor)),
        ],
        "communication_buffers": _lasting_buckets(engine.optimizer),
    }


def _lasting_buckets(optimizer: Any) -> Iterable[Tensor]:
    """Stage 3 keeps its bucket; the others make theirs anew in each step."""
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    return (bucket.buffer for bucket in buckets if isinstance(bucket.buffer, Tensor))


def masters_of(engine: Any, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The fp32 masters that stand on this rank for the parameters of `trained`, one for each, as in bf16 without ZeRO;
    none where shards do, or the parameters themselves are stepped."""
    groups = getattr(engine.optimizer, "fp32_groups", ())
    masters: dict[int, Tensor] = {}
    for parameters, of_group in zip(getattr(engine.optimizer, "fp16_groups", ()), groups, strict=False):
        masters |= {id(p): master for p, master in zip(parameters, of_group, strict=True)}
    return {name: masters[id(parameter)] for name, parameter in trained.items() if id(parameter) in masters}


def _listed(optimizer: Any, names: Iterable[str]) -> Iterable[Tensor]:
    """Tensors, lists of them, or lists of lists."""
    for name in names:
        yield from _flat(getattr(optimizer, name, ()))


def _flat(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for inner in value:
            yield from _flat(inner)
