"""Deliberately broken tensor parallelism: each class has one fault of the kind that trains on without an error, and
each must fail the parity gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from impls.native.parts import tensor_layers
from impls.native.parts.tensor_exchange import Finish
from impls.native.parts.tensor_model import TensorSlice
from impls.native.tensor import NativeTensorParallel


class _Mutant(NativeTensorParallel):
    @property
    def slice(self) -> TensorSlice:
        assert isinstance(self.model, TensorSlice)
        return self.model


class BiasAddedByAll(_Mutant):
    """Each rank adds the bias to its summand."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        num_ranks = self.slice.context.exchange.num_ranks
        for name, layer in self.slice._layers.items():
            module: Any = self.module.get_submodule(name)
            if name.endswith("projection"):

                def forward(inputs: Tensor, module: Any = module, layer: Any = layer) -> Tensor:
                    return tensor_layers.row_linear(inputs, module.weight, module.bias * num_ranks, layer)

                module.forward = forward


class NoSumOnEntering(_Mutant):
    """The wrong conjugate: the gradient of a region's input is this rank's summand alone."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        context, start_leave = self.slice.context, self.slice.context.start_leave

        def leave(own: Tensor) -> Finish:
            return own.clone if context.task.is_running() else start_leave(own)

        context.start_leave = leave  # type: ignore[method-assign]


class AlikeCountedByAll(_Mutant):
    """Parameters that all ranks hold alike count once a rank in the norm."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.slice.counts = lambda kind: True  # type: ignore[method-assign]


class PartialNotSummed(_Mutant):
    """The gradient of a norm over local heads is left as this rank's summand."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.slice.sum_partial = lambda kinds, gradients: None  # type: ignore[method-assign]


class FusedCutAcrossParts(_Mutant):
    """Queries, keys and values cut as if they were one: the first rank has all queries."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name, cut in self.slice._cuts.items():
            if cut.parts > 1:
                self.slice._cuts[name] = type(cut)(dim=cut.dim, size=cut.size, degree=cut.degree)
