"""Which elements of a parameter each rank of a tensor-parallel group holds: whole units of one dim, of each fused part.

weight (3 * heads * width, ...), parts=3, unit=width      rank 0 of 2: | q0 q1 | k0 k1 | v0 v1 |
| q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3 |               rank 1:      | q2 q3 | k2 k3 | v2 v3 |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.tensor_plan import ColumnParallel, ResolvedPlan, Role, RowParallel, check_divides, check_ties


@dataclass(frozen=True, kw_only=True)
class Cut:
    """`dim` of a parameter, `size` long, is `parts` parts of units, cut among `degree` ranks. The first ranks have a
    unit more where their number does not divide."""

    dim: int
    size: int
    degree: int
    unit: int = 1
    parts: int = 1

    @property
    def num_units(self) -> int:
        """In each part."""
        return self.size // (self.parts * self.unit)

    def bounds(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the rank's elements within each part."""
        each, more = divmod(self.num_units, self.degree)
        start = rank * each + min(rank, more)
        return start * self.unit, (start + each + (rank < more)) * self.unit

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """The rank's elements of `whole`, in memory of their own."""
        start, stop = self.bounds(rank)
        pieces = [part.narrow(self.dim, start, stop - start) for part in whole.chunk(self.parts, self.dim)]
        return torch.cat(pieces, self.dim)

    def whole(self, locals_: Sequence[Tensor]) -> Tensor:
        """What the ranks' elements make together; inverse of `local`."""
        if not self.size:
            return locals_[0]
        of_ranks = [local.chunk(self.parts, self.dim) if local.shape[self.dim] else () for local in locals_]
        parts = (torch.cat([pieces[part] for pieces in of_ranks if pieces], self.dim) for part in range(self.parts))
        return torch.cat(list(parts), self.dim)


def cuts_of(model: nn.Module, plan: ResolvedPlan, degree: int) -> dict[str, Cut]:
    """How each parameter that is cut is cut, by all of its names. ValueError with every number where units do not
    divide by the degree, or where a tied parameter would be cut in two ways or at one of its names only."""
    check_divides(model, plan, degree)
    check_ties(model, plan)
    return {
        f"{name}.{kind}": cut
        for name, role in plan.roles.items()
        for kind, parameter in model.get_submodule(name).named_parameters(recurse=False)
        if (cut := _cut(role, kind, parameter, degree)) is not None
    }


def _cut(role: Role, kind: str, parameter: nn.Parameter, degree: int) -> Cut | None:
    if isinstance(role, RowParallel):
        return Cut(dim=1, size=parameter.shape[1], degree=degree, unit=role.unit) if kind == "weight" else None
    if isinstance(role, ColumnParallel):
        return Cut(dim=0, size=parameter.shape[0], degree=degree, unit=role.unit, parts=role.parts)
    return Cut(dim=0, size=parameter.shape[0], degree=degree)


def take_local(model: nn.Module, cuts: Mapping[str, Cut], rank: int) -> None:
    """Cuts the parameters of `model` in place; a tied one stays one, and layers learn their new sizes."""
    made: dict[int, nn.Parameter] = {}
    for name, cut in cuts.items():
        path, _, kind = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module.get_parameter(kind)
        if id(parameter) not in made:
            local = nn.Parameter(cut.local(parameter.detach(), rank), requires_grad=parameter.requires_grad)
            made[id(parameter)] = made[id(local)] = local
        setattr(module, kind, made[id(parameter)])
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings = module.weight.shape[0]
