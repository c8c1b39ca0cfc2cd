"""How tensor parallelism may cut a model: which modules hold which kind of slice. A part of the workload.

    region    x -> | column-parallel ... row-parallel | -> sum over ranks -> y
                     rank r has some columns, and the rows that they feed

A column-parallel layer leaves each rank some of its outputs, a row-parallel one takes these and yields a summand of
the whole; what lies between them works on its own slice. The module around a row-parallel layer and the column-parallel
ones that feed it is a region. Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
Model Parallelism".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from harness.parameters import has_hooks


@dataclass(frozen=True, kw_only=True)
class ColumnParallel:
    """An nn.Linear of which each rank holds some output features, in whole `unit`s (a head's width). A fused layer has
    `parts` (query, key, value), one after another, and each of them is cut alike."""

    unit: int = 1
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class RowParallel:
    """An nn.Linear of which each rank holds some input features, in whole `unit`s; its bias is added once, to the
    sum."""

    unit: int = 1


@dataclass(frozen=True, kw_only=True)
class VocabularyParallel:
    """An nn.Embedding, or the nn.Linear that yields logits, of which each rank holds some of the vocabulary."""


Role = ColumnParallel | RowParallel | VocabularyParallel
TensorPlan = Mapping[str, Role]
"""Roles by module name, as in `model.named_modules()`; `*` stands for any characters."""
TensorPlanner = Callable[[nn.Module], TensorPlan]
"""Makes the plan of a model, which may lie on the meta device."""


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """`roles` of the modules by name, in the order of `model.named_modules()`, and the names of the regions."""

    roles: Mapping[str, Role]
    regions: tuple[str, ...]

    def region_of(self, name: str) -> str | None:
        """The region that the module `name` lies in, or is."""
        return next((region for region in self.regions if f"{name}.".startswith(f"{region}." if region else "")), None)


def resolve(model: nn.Module, plan: TensorPlan) -> ResolvedPlan:
    """The plan for the modules of `model`. ValueError, which names the module, where a pattern meets nothing, a role is
    given to a module that cannot have it, or a column-parallel layer feeds no row-parallel one."""
    modules = dict(model.named_modules())
    roles: dict[str, Role] = {}
    for pattern, role in plan.items():
        found = [name for name in modules if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"tensor plan: expected {pattern!r} to name a module of the model, it names none")
        for name in found:
            kinds = (nn.Linear, nn.Embedding) if isinstance(role, VocabularyParallel) else (nn.Linear,)
            if not isinstance(modules[name], kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(
                    f"tensor plan: {pattern!r} is {type(role).__name__}, which takes {expected}, got "
                    f"{type(modules[name]).__name__} at {name}"
                )
            roles[name] = role
    regions = dict.fromkeys(name.rpartition(".")[0] for name, role in roles.items() if isinstance(role, RowParallel))
    resolved = ResolvedPlan(
        roles={name: roles[name] for name in modules if name in roles},
        # The innermost first: a module belongs to the region closest to it.
        regions=tuple(sorted(regions, key=lambda region: -region.count("."))),
    )
    for name, role in resolved.roles.items():
        if isinstance(role, ColumnParallel) and resolved.region_of(name) is None:
            raise ValueError(f"tensor plan: {name} is column-parallel, and no row-parallel layer beside it sums up")
    return resolved


def check_divides(model: nn.Module, plan: ResolvedPlan, degree: int) -> None:
    """ValueError with every number where a layer's units do not divide by `degree`: a head cannot be cut, and attention
    wants as many key heads a query head on every rank. A vocabulary need not divide."""
    for name, role in plan.roles.items():
        if isinstance(role, VocabularyParallel):
            continue
        num_outputs, num_inputs = model.get_parameter(f"{name}.weight").shape
        size, features = (num_outputs, "output") if isinstance(role, ColumnParallel) else (num_inputs, "input")
        parts = role.parts if isinstance(role, ColumnParallel) else 1
        in_parts = f" in {parts} parts" if parts > 1 else ""
        if size % (parts * role.unit):
            raise ValueError(
                f"tensor plan: {name} has {size} {features} features{in_parts}, which are no whole units of {role.unit}"
            )
        num_units = size // (parts * role.unit)
        if num_units % degree:
            raise ValueError(
                f"tensor={degree} does not divide {name}: {size} {features} features{in_parts} are {num_units} units "
                f"of {role.unit}{' a part' if parts > 1 else ''}"
            )


def check_ties(model: nn.Module, plan: ResolvedPlan) -> None:
    """ValueError where a tied parameter would be cut in two ways, or at one of its names only: at each its layer takes
    it for what its own role says."""
    ways: dict[int, tuple[str, tuple[int, int, int]]] = {}
    cut: set[str] = set()
    for name, role in plan.roles.items():
        for kind, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if (way := _way_of_cutting(role, kind)) is None:
                continue
            cut.add(f"{name}.{kind}")
            _, first = ways.setdefault(id(parameter), (f"{name}.{kind}", way))
            if way != first:
                raise ValueError(f"tensor plan: {name}.{kind} is tied to a parameter that is cut in another way")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in ways and name not in cut:
            raise ValueError(
                f"tensor plan: {name} is tied to {ways[id(parameter)][0]}, which is cut, and has no role: expected the "
                "plan to name both"
            )


def check_hooks(model: nn.Module, plan: ResolvedPlan) -> None:
    """ValueError where a parameter that is cut has a hook on its gradient, of which no rank has all."""
    for name, role in plan.roles.items():
        for kind, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if _way_of_cutting(role, kind) is not None and has_hooks(parameter):
                raise ValueError(
                    f"tensor plan: {name}.{kind} is cut, and has a hook on its gradient, of which no rank has all: "
                    "expected hooks on uncut parameters only"
                )


def _way_of_cutting(role: Role, kind: str) -> tuple[int, int, int] | None:
    """(dim, unit, parts) of a layer's parameter, None where it stays whole."""
    if isinstance(role, RowParallel):
        return (1, role.unit, 1) if kind == "weight" else None
    return (0, role.unit, role.parts) if isinstance(role, ColumnParallel) else (0, 1, 1)


def partial_parameters(model: nn.Module, plan: ResolvedPlan) -> set[str]:
    """Names of parameters that all ranks hold alike and use on their own slices, so that their gradients are summands:
    what lies within regions and is not cut, but for biases that are added to a sum (norms over local heads, say)."""
    cut_or_added = {f"{name}.{kind}" for name in plan.roles for kind in ("weight", "bias")}
    names = (name for name, _ in model.named_parameters())
    return {name for name in names if plan.region_of(name.rpartition(".")[0]) is not None} - cut_or_added


def from_transformers(causal: Any) -> TensorPlan:
    """The plan of a causal language model of transformers, from its configuration's own `base_model_tp_plan`. Heads
    stay whole; the embedding and the head are cut by the vocabulary. Entries that do not cut (norms whose gradients are
    summed) say nothing new here. ValueError for a model without a plan or with a kind of slice not known here."""
    written = getattr(causal.config, "base_model_tp_plan", None)
    if not written:
        raise ValueError(f"tensor plan: {type(causal).__name__} has no base_model_tp_plan")
    config, base = causal.config, causal.base_model_prefix
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plan: dict[str, Role] = {}
    for name, style in written.items():
        unit = head_width if "attn" in name or "attention" in name else 1
        if style == "colwise":
            plan[f"{base}.{name}"] = ColumnParallel(unit=unit)
        elif style == "rowwise":
            plan[f"{base}.{name}"] = RowParallel(unit=unit)
        elif style not in ("replicated_with_grad_allreduce", "sequence_parallel"):
            raise ValueError(
                f"tensor plan: expected colwise, rowwise or replicated_with_grad_allreduce, got {style!r} at {name}"
            )
    names = {id(module): name for name, module in causal.named_modules()}
    for module in (causal.get_input_embeddings(), causal.get_output_embeddings()):
        if module is not None:
            plan[names[id(module)]] = VocabularyParallel()
    return plan


def under(prefix: str, plan: TensorPlan) -> TensorPlan:
    """The plan for a model that holds the planned one as `prefix`."""
    return {f"{prefix}.{name}": role for name, role in plan.items()}
