"""Which parameters the operations of a forward pass touch. A parameter is known by its storage, so that a view of it is
the parameter as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def storage_key(tensor: Tensor) -> int:
    """What all views of the same memory have in common, seen through the wrappers of torch.func."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    key: int = tensor.untyped_storage()._cdata
    return key


def names_by_storage(model: nn.Module, names: Iterable[str]) -> dict[int, list[str]]:
    """By `storage_key` the parameters of `model` that lie there, of those named."""
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(storage_key(model.get_parameter(name)), []).append(name)
    return found


_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def tensors_in(value: object, _entered: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor in `value`, however nested in containers and dataclasses; a container is entered once, though it be
    there several times or hold itself."""
    if isinstance(value, Tensor):
        yield value
        return
    entered = set() if _entered is None else _entered
    items: Iterable[object] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = vars(value).values() if hasattr(value, "__dict__") else ()
    if items and id(value) not in entered:
        entered.add(id(value))
        for item in items:
            if type(item) not in _PLAIN:  # a table of a hundred thousand numbers, say
                yield from tensors_in(item, entered)


def kept_in(module: nn.Module) -> Iterator[Tensor]:
    """Every tensor that an attribute of `module`, or of a module within, holds and that is registered nowhere."""
    registered = ("_parameters", "_buffers", "_modules")
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in registered:
                yield from tensors_in(value)


class Operations(TorchDispatchMode):
    """Notes what every operation is given: scripted modules run theirs out of Python's sight."""

    def __init__(self, note: Callable[[object], None], made: Callable[[object], None] = lambda value: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no annotations
        self._note, self._made = note, made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, which takes longer than all of this, to keep it out of here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs))
        output = func(*args, **(kwargs or {}))
        self._made(output)
        return output
