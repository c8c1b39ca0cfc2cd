"""In which order a forward pass uses the parameters: buckets are filled in the reverse of it, since that is the order
in which backward completes their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call


def order_of_use(model: nn.Module, inputs: Tensor) -> list[str]:
    """Names of all parameters, in the order in which the modules that own them are entered.

    A forward pass on the meta device, which computes nothing and changes nothing, finds it; a model that cannot run
    there (its control flow depends on values), and any parameter the pass does not reach, keeps registration order.
    """
    registered = {parameter: name for name, parameter in model.named_parameters()}  # a tied one under its first name
    owned = {module: [registered[p] for p in module.parameters(recurse=False)] for module in model.modules()}
    entered: dict[str, None] = {}

    def note(module: nn.Module, _: object) -> None:
        entered.update(dict.fromkeys(owned[module]))

    hooks = [module.register_forward_pre_hook(note) for module, names in owned.items() if names]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    try:
        with torch.no_grad():
            functional_call(model, on_meta, (inputs.to("meta"),))
    except Exception:
        return list(registered.values())
    finally:
        for hook in hooks:
            hook.remove()
    return [*entered, *(name for name in registered.values() if name not in entered)]
