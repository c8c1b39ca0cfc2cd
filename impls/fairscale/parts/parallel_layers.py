"""A model cut along the tensor axis: FairScale's model-parallel layers in place of those that a tensor plan names.

Each of these layers cuts the weight that its `init_method` fills in: it is given the model's own, whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.parameters import LogicalParameter, logical_parameters
from harness.tensor_plan import ColumnParallel, ResolvedPlan, Role, RowParallel, partial_parameters, resolve
from harness.workload import Workload, cross_entropy_sum


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Along which dim a parameter is cut, and of how many parts each rank has its share."""

    dim: int
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class LayerCut:
    """What was cut: the parameters as they were whole, how each that is cut is sliced, and of those that are whole on
    every rank the names of those whose gradients are summands."""

    registry: tuple[LogicalParameter, ...]
    slices: Mapping[str, Slices]
    partial: frozenset[str]

    def whole(self, name: str, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The parameter, or its gradient, on the CPU. Collective."""
        if name not in self.slices:
            return local.detach().cpu().clone()
        cut = self.slices[name]
        pieces = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(pieces, local.detach().contiguous(), group=group)
        shares = [piece.chunk(cut.parts, cut.dim) for piece in pieces]  # by rank, then by part
        return torch.cat([share[part] for part in range(cut.parts) for share in shares], cut.dim).cpu()


def plan_of(workload: Workload, model: nn.Module) -> ResolvedPlan:
    assert workload.tensor_plan is not None
    return resolve(model, workload.tensor_plan(model))


def slices_of(plan: ResolvedPlan, model: nn.Module) -> dict[str, Slices]:
    """By the first name of each parameter that is cut."""
    known = {parameter.name for parameter in logical_parameters(model)}
    found = {}
    for name, role in plan.roles.items():
        if isinstance(role, RowParallel):
            found[f"{name}.weight"] = Slices(dim=1)
        else:
            parts = role.parts if isinstance(role, ColumnParallel) else 1
            found |= {f"{name}.{kind}": Slices(dim=0, parts=parts) for kind in ("weight", "bias")}
    return {name: cut for name, cut in found.items() if name in known}


def cuts_logits(workload: Workload) -> bool:
    """Whether logits stay cut, for FairScale's cross-entropy over parts of a vocabulary."""
    return workload.loss is cross_entropy_sum


def cut(model: nn.Module, workload: Workload) -> LayerCut:
    """Puts FairScale's layers in place of those that the plan names. Its groups exist already."""
    plan = plan_of(workload, model)
    result = LayerCut(
        registry=logical_parameters(model, workload.decays),
        slices=slices_of(plan, model),
        partial=frozenset(partial_parameters(model, plan)),
    )
    modules = dict(model.named_modules())
    for name, role in plan.roles.items():
        with _default_dtype(modules[name].weight.dtype):
            layer = _parallel_layer(modules[name], role, gathers=not cuts_logits(workload))
        model.set_submodule(name, layer.train())
    for parameter in result.registry:
        for alias in parameter.aliases:
            path, _, kind = alias.rpartition(".")
            setattr(model.get_submodule(path), kind, model.get_parameter(parameter.name))
    return result


def _parallel_layer(whole: nn.Module, role: Role, *, gathers: bool) -> nn.Module:
    from fairscale.nn.model_parallel import layers

    def fill(weight: Tensor) -> Tensor:
        with torch.no_grad():
            return weight.copy_(whole.get_parameter("weight"))

    made: Any
    if isinstance(whole, nn.Embedding):
        made = layers.VocabParallelEmbedding(
            whole.num_embeddings, whole.embedding_dim, padding_idx=whole.padding_idx, init_method=fill
        )
        made.weight.requires_grad_(whole.weight.requires_grad)
        return made  # type: ignore[no-any-return]
    assert isinstance(whole, nn.Linear)
    sizes, has_bias = (whole.in_features, whole.out_features), whole.bias is not None
    if isinstance(role, RowParallel):
        made = layers.RowParallelLinear(*sizes, has_bias, input_is_parallel=True, init_method=fill)
    else:
        gathered = gathers and not isinstance(role, ColumnParallel)
        parts = role.parts if isinstance(role, ColumnParallel) else 1
        made = layers.ColumnParallelLinear(*sizes, has_bias, gather_output=gathered, init_method=fill, stride=parts)
    made.weight.requires_grad_(whole.weight.requires_grad)
    if has_bias:
        with torch.no_grad():
            made.bias.copy_(whole.bias if isinstance(role, RowParallel) else _own_part(whole.bias, parts))
        made.bias.requires_grad_(whole.bias.requires_grad)
    return made  # type: ignore[no-any-return]


def _own_part(bias: Tensor, parts: int) -> Tensor:
    """Of each part this rank's share."""
    from fairscale.nn.model_parallel import initialize

    rank, num_ranks = initialize.get_model_parallel_rank(), initialize.get_model_parallel_world_size()
    return torch.cat([part.chunk(num_ranks)[rank] for part in bias.chunk(parts)])


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """FairScale's layers make their weights in torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
