"""The moment in each backward at which the first gradient is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle


def at_first_gradient(parameters: Iterable[nn.Parameter], act: Callable[[], None]) -> None:
    """Calls `act` before any hook that is registered later. Whose gradient comes first, the first backward tells, so
    that later ones carry a single hook."""
    handles: dict[nn.Parameter, RemovableHandle] = {}

    def come(parameter: nn.Parameter) -> None:
        for other in [known for known in handles if known is not parameter]:
            handles.pop(other).remove()
        act()

    for parameter in parameters:
        handles[parameter] = parameter.register_post_accumulate_grad_hook(come)
