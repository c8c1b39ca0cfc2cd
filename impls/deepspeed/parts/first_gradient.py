"""When gradients come: the moment of the first one in each backward, and dry runs in which none is there before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn
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


def gradients_come_late(model: nn.Module, gradients: Mapping[str, Tensor]) -> Callable[[Tensor], None]:
    """A harness.implementation.Preparation: autograd makes them in backward, and they are gone after it."""
    parameters = dict(model.named_parameters())
    for name in gradients:
        parameters[name].grad = None
    return lambda loss: None
