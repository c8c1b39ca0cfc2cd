"""Which parameters the operations of a forward pass touch. A parameter is known by its storage, so that a view of it is
the parameter as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def names_by_storage(model: nn.Module, names: Iterable[str]) -> dict[int, list[str]]:
    """By `untyped_storage()._cdata` the parameters of `model` that lie there, of those named."""
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(model.get_parameter(name).untyped_storage()._cdata, []).append(name)
    return found


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in `value`, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item)


class Operations(TorchDispatchMode):
    """Notes what every operation is given: scripted modules run theirs out of Python's sight."""

    def __init__(self, note: Callable[[object], None], made: Callable[[object], None] = lambda value: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no annotations
        self._note, self._made = note, made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs))
        output = func(*args, **(kwargs or {}))
        self._made(output)
        return output
