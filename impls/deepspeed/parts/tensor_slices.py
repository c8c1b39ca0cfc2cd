"""A workload's tensor plan as DeepSpeed's AutoTP takes it, and what it has cut, put together again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.tensor_plan import (
    ColumnParallel,
    ResolvedPlan,
    RowParallel,
    VocabularyParallel,
    partial_parameters,
    resolve,
)
from harness.workload import Workload, cross_entropy_sum

Head = Literal["cut", "gathered", "whole"]
"""What becomes of the layer that yields logits: cut by the vocabulary, with logits that stay cut or that every rank
gathers; or whole."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Of a parameter whose `dim` is cut each rank has a piece of each of its `parts`, one after another."""

    dim: int
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class TensorSlices:
    """The layers that AutoTP replaces, each with what its specification says beside the name; how each parameter that
    it cuts is cut, by each of its names; the parameters whose gradients are summed; what has become of the head; the
    layer whose logits stay cut, if they do, and the embeddings that share its weight."""

    layers: Mapping[str, dict[str, Any]]
    slices: Mapping[str, Slice]
    summed: tuple[str, ...]
    head: Head
    cut_head: str | None = None
    cut_embeddings: tuple[str, ...] = ()

    @property
    def configuration(self) -> dict[str, Any]:
        """As `tensor_parallel` has it, but for the degree."""
        return {"partition_config": self.partition_config, "vocab_parallel_lm_head": self.cut_head is not None}

    @property
    def partition_config(self) -> dict[str, Any]:
        """It knows a head whose logits stay cut by the last part of its name."""
        specs = [
            {"patterns": [f"{re.escape(name)}\\.weight$"], **spec}
            for name, spec in self.layers.items()
            if name != self.cut_head
        ]
        if self.summed:
            patterns = [f"{re.escape(name)}$" for name in self.summed]
            specs.append({"patterns": patterns, "partition_type": "skip", "grad_allreduce": True})
        config: dict[str, Any] = {"use_default_specs": False, "layer_specs": specs}
        if self.cut_head is not None:
            config["lm_head_patterns"] = [_last_part(self.cut_head)]
        return config

    def whole(self, name: str, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The parameter `name`, or its gradient, of which this rank has `own`, on the CPU. Collective."""
        own = own.detach().cpu()
        if name not in self.slices:
            return own.clone()
        cut = self.slices[name]
        pieces: list[Any] = [None] * group.size()
        dist.all_gather_object(pieces, own, group=group)
        of_parts = zip(*(piece.chunk(cut.parts, cut.dim) for piece in pieces), strict=True)
        return torch.cat([torch.cat(part, cut.dim) for part in of_parts], cut.dim)


def slices_of(model: nn.Module, workload: Workload, *, head: Head) -> TensorSlices:
    """Embeddings stay whole, but for those that share the weight of a head whose logits stay cut. Where they cannot,
    they are gathered; where they cannot be gathered, because an embedding shares the weight, the head stays whole.
    Parameters that ranks use on their own slices have their gradients summed."""
    assert workload.tensor_plan is not None
    plan = resolve(model, workload.tensor_plan(model))
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    cut_head = _cut_head(model, plan, workload) if head == "cut" else None
    layers: dict[str, dict[str, Any]] = {}
    slices: dict[str, Slice] = {}
    settled: Head = "whole"
    for name, role in plan.roles.items():
        layer = model.get_submodule(name)
        weight, bias = f"{name}.weight", f"{name}.bias"
        if isinstance(role, RowParallel):
            layers[name] = {"partition_type": "row"}
            slices[weight] = Slice(dim=1)
        elif isinstance(role, ColumnParallel):
            fused = {"shape": [role.parts, -1], "partition_dim": 0} if role.parts > 1 else {}
            layers[name] = {"partition_type": "column", **fused}
            slices |= {weight: Slice(dim=0, parts=role.parts), bias: Slice(dim=0, parts=role.parts)}
        elif name == cut_head:
            settled, layers[name] = "cut", {"partition_type": "column"}
            slices |= {weight: Slice(dim=0), bias: Slice(dim=0)}
        elif head != "whole" and isinstance(layer, nn.Linear) and id(layer.weight) not in tied:
            settled, layers[name] = "gathered", {"partition_type": "column", "gather_output": True}
            slices |= {weight: Slice(dim=0), bias: Slice(dim=0)}
    cut_embeddings = () if cut_head is None else _embeddings_of(model, cut_head)
    slices |= {f"{name}.weight": Slice(dim=0) for name in cut_embeddings}
    return TensorSlices(
        layers=layers,
        slices=slices,
        summed=tuple(sorted(partial_parameters(model, plan))),
        head=settled,
        cut_head=cut_head,
        cut_embeddings=cut_embeddings,
    )


def _cut_head(model: nn.Module, plan: ResolvedPlan, workload: Workload) -> str | None:
    """The layer whose logits can stay cut, for DeepSpeed's cross-entropy over parts of a vocabulary: it takes one."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    heads = [name for name in linear if isinstance(plan.roles.get(name), VocabularyParallel)]
    if workload.loss is not cross_entropy_sum or len(heads) != 1:
        return None
    namesakes = [name for name in linear if _last_part(name) == _last_part(heads[0])]
    embeddings = [model.get_submodule(name) for name in _embeddings_of(model, heads[0])]
    return heads[0] if len(namesakes) == 1 and all(map(_is_plain, embeddings)) else None


def _embeddings_of(model: nn.Module, head: str) -> tuple[str, ...]:
    """The embeddings that share its weight."""
    weight = model.get_submodule(head).weight
    return tuple(name for name, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight is weight)


def _is_plain(embedding: Any) -> bool:
    """Whether DeepSpeed has a layer for it that is cut by the vocabulary."""
    unusual = embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse
    return type(embedding).forward is nn.Embedding.forward and not unusual


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
