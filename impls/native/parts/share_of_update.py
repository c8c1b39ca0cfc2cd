"""A share of the update: what a sharded optimizer leaves one rank to step, without the others' shares."""

from __future__ import annotations

from torch import Tensor, nn

from harness.optimizer import NormOfNamed, RecipeOptimizer, Update
from harness.workload import Workload


class ShareOfUpdate(RecipeOptimizer):
    """Steps the first of `num_shards` parts of each trainable parameter; the others stay what they are."""

    def __init__(self, model: nn.Module, workload: Workload, num_shards: int) -> None:
        self._wholes = dict(model.named_parameters())
        super().__init__(
            model,
            workload,
            stepped={
                name: parameter.detach().reshape(-1)[: num_updated(parameter.numel(), num_shards)]
                for name, parameter in self._wholes.items()
            },
        )

    def clear_gradients(self) -> None:
        super().clear_gradients()
        for whole in self._wholes.values():
            whole.grad = None

    def step(self, *, tracks_norm: bool, norm_of: NormOfNamed | None = None) -> Update:
        for name, part in zip(self.names, self.parameters, strict=True):
            gradient = self._wholes[name].grad
            part.grad = None if gradient is None else gradient.reshape(-1)[: len(part)]
        return super().step(tracks_norm=tracks_norm, norm_of=norm_of)

    def full_parameters(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}

    def live_gradients(self) -> list[Tensor]:
        return [whole.grad for whole in self._wholes.values() if whole.grad is not None]


def num_updated(num_elements: int, num_shards: int) -> int:
    """Of a parameter's elements."""
    return -(-num_elements // num_shards)
