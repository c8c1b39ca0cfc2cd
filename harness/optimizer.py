"""The workload's recipe in plain torch: decay groups, fused update, fp32 masters, clipping, skipping, schedule.

The reference trains with it, and so does every peer that takes a torch optimizer, so that none of them differs by a
default (weight decay coupled or not, clipping at 1.0, a scheduler stepped per micro-batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from harness.parameters import LogicalParameter, logical_parameters
from harness.workload import Training, Workload

_NORM_BLOCK = 4096  # elements
OptimizerFactory = Callable[[list[dict[str, object]]], Optimizer]
NormOfNamed = Callable[[Mapping[str, Tensor]], Tensor]
"""The global norm, from this rank's gradients by name."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one optimizer step did. `gradient_norm` is global and before clipping, None where nobody asked."""

    gradient_norm: Tensor | None
    skipped: bool
    learning_rates: tuple[float, ...]


def torch_optimizer(training: Training, groups: list[dict[str, object]]) -> Optimizer:
    """torch's own fused AdamW or SGD over parameter groups that carry their `weight_decay`."""
    if training.optimizer == "sgd":
        return SGD(groups, lr=training.learning_rate, momentum=training.momentum, fused=True)
    betas = (training.beta1, training.beta2)
    return AdamW(groups, lr=training.learning_rate, betas=betas, eps=training.epsilon, fused=True)


class RecipeOptimizer:
    """Steps the trainable parameters of `model`, whose gradients are whole and already reduced.

    With masters the optimizer steps fp32 copies and the parameters are rounded from them; while it does, gradients have
    fp32 copies too, all at once, which no predicted peak counts. `factory` may put another optimizer class in torch's
    place (a sharded one); it gets the parameter groups. `stepped` are what stands in for the trainable parameters, by
    name: shards of them.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        factory: OptimizerFactory | None = None,
        *,
        stepped: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._training = workload.training
        self._num_updates = 0
        self._gradients: list[Tensor | None] = []
        self._clip_scale: Tensor | None = None
        named: Mapping[str, Tensor] = dict(model.named_parameters()) if stepped is None else stepped
        registry = [parameter for parameter in logical_parameters(model, workload.decays) if parameter.trainable]
        self.names = [parameter.name for parameter in registry]
        self.parameters: list[Tensor] = [named[name] for name in self.names]
        master = workload.precision.master
        self.masters: list[Tensor] = list(self.parameters)
        if master is not None:
            self.masters = [parameter.detach().to(master, copy=True) for parameter in self.parameters]
        groups = decay_groups(registry, self.masters, self._training.weight_decay)
        make = factory or (lambda groups: torch_optimizer(self._training, groups))
        self.optimizer = make(groups) if groups else None

    def clear_gradients(self) -> None:
        """Lets go of the last step's gradients; without it they would stay while the next ones are made."""
        self._gradients = []
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def uses_masters(self) -> bool:
        return any(master is not parameter for master, parameter in zip(self.masters, self.parameters, strict=True))

    @property
    def learning_rate(self) -> float:
        """That of the next update."""
        return self._training.learning_rate_at(self._num_updates)

    def step(self, *, tracks_norm: bool, norm_of: NormOfNamed | None = None) -> Update:
        """One update from the parameters' gradients, which it clips in place; `norm_of` finds the global norm where
        these are not all there are."""
        grads = [parameter.grad for parameter in self.parameters]
        self._gradients, self._clip_scale = grads, None
        learning_rate = self.learning_rate
        norm = None
        if tracks_norm or self._training.checks_norm:
            named = {name: grad for name, grad in zip(self.names, grads, strict=True) if grad is not None}
            norm = global_norm(list(named.values())) if norm_of is None else norm_of(named)
        skipped = self._training.skip_nonfinite and norm is not None and not bool(torch.isfinite(norm))
        if not skipped and self.optimizer is not None:
            self._update(grads, norm, learning_rate)
        self._num_updates += not skipped
        return Update(gradient_norm=norm, skipped=skipped, learning_rates=(learning_rate,) * self.num_groups)

    def unclipped_gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step before clipping, by name, on the CPU; unused parameters are absent."""
        scale = 1.0 if self._clip_scale is None else float(self._clip_scale)
        return {
            name: (grad.detach().cpu() / scale).clone()
            for name, grad in zip(self.names, self._gradients, strict=True)
            if grad is not None
        }

    def full_parameters(self, model: nn.Module) -> dict[str, Tensor]:
        """Every parameter of `model` by name, on the CPU; the masters where there are any."""
        masters = dict(zip(self.names, self.masters, strict=True))
        return {
            name: masters.get(name, parameter).detach().cpu().clone() for name, parameter in model.named_parameters()
        }

    def full_state(self) -> dict[str, dict[str, Tensor]]:
        """What is remembered of each parameter, see Implementation.full_optimizer_state; torch itself makes a state
        with the first update."""
        full: dict[str, dict[str, Tensor]] = {}
        moments = self._training.moment_names
        for name, master in zip(self.names, self.masters, strict=True):
            if not moments or not master.numel():
                continue
            state = {} if self.optimizer is None else self.optimizer.state.get(master, {})
            full[name] = {moment: state.get(moment, torch.zeros_like(master)).cpu().clone() for moment in moments}
            if self._training.optimizer == "adamw":
                full[name]["step"] = state.get("step", torch.zeros(())).cpu().clone()
        return full

    def live_gradients(self) -> list[Tensor]:
        """The gradients that exist now, for memory accounts."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    @property
    def num_groups(self) -> int:
        return 0 if self.optimizer is None else len(self.optimizer.param_groups)

    def state_tensors(self) -> Iterable[Tensor]:
        """Masters and moments, for memory accounts."""
        if self.uses_masters:
            yield from self.masters
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _update(self, grads: list[Tensor | None], norm: Tensor | None, learning_rate: float) -> None:
        assert self.optimizer is not None
        if self._training.clip_norm is not None and norm is not None:
            self._clip_scale = clip_coefficient(norm, self._training.clip_norm)
            for grad in grads:
                if grad is not None:
                    grad.mul_(self._clip_scale)  # not rounded to the gradient's dtype first
        if self.uses_masters:
            for master, grad in zip(self.masters, grads, strict=True):
                master.grad = None if grad is None else grad.to(master.dtype)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        if self.uses_masters:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](self.parameters), self.masters)
            for master in self.masters:
                master.grad = None


def decay_groups(
    registry: Sequence[LogicalParameter], tensors: Sequence[Tensor], weight_decay: float
) -> list[dict[str, object]]:
    """Parameter groups for a torch optimizer: the decayed ones and the others; an empty group is left out."""
    groups: list[dict[str, object]] = []
    for decayed in (True, False):
        members = [t for p, t in zip(registry, tensors, strict=True) if p.decayed is decayed]
        if members:
            groups.append({"params": members, "weight_decay": weight_decay if decayed else 0.0})
    return groups


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all elements, an fp64 scalar on the gradients' device.

    It is gathered from the norms of blocks: summed in one go in fp32, the squares of a flat buffer of 6.5M elements
    lose 2e-4 of the norm, and asking for fp64 inside costs 18 times as much on a CPU.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([_norms_of_blocks(gradient) for gradient in gradients]))
    return norm


def norm_over_ranks(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The norm of what the ranks of `group` hold together, from each one's `own`, an fp64 scalar; the same bits on all
    of them. Collective: (n-1) fp64 numbers leave each rank."""
    if group.size() == 1:
        return own
    norms = own.new_empty(group.size())
    dist.all_gather_single(norms, own.view(1), group=group)
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def _norms_of_blocks(gradient: Tensor) -> Tensor:
    """(blocks,) in fp64; the blocks' squares are summed in the gradient's dtype, in fp32 at least."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    flat = gradient.reshape(-1)
    whole = flat.numel() // _NORM_BLOCK * _NORM_BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_BLOCK), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return torch.cat([blocks, rest.view(1)]).double()


def clip_coefficient(norm: Tensor, clip_norm: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `clip_norm`; 1 where it already is."""
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
