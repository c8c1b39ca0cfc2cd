"""Models built without drawing their weights, for those whose tensors have no memory to hold them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = (Tensor.normal_, Tensor.uniform_)


class Uninitialised(TorchFunctionMode):
    """Leaves out torch.nn.init and what draws in place. On the meta device, where that changes nothing, `normal_` has
    torch import its compiler, which takes longer than all the rest."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS or getattr(func, "__module__", None) == nn.init.__name__:
            tensor = args[0] if args else kwargs["tensor"]
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)
