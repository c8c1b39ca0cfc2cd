"""The built-in workloads: one module each, whose `workload(training, **options)` builds it.

A workload is written as text, so that a case can be stored, compared and typed: `gpt`, `gpt:size=17m,tied=true`, or
`path/to/file.py:builder` for a user's own, with the same options behind a second colon. An option that names a field
of Training goes there, every other one to the builder.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from harness.loading import load_from_file
from harness.typed_values import as_typed
from harness.workload import TRAINING_OPTIONS, Training, Workload

Builder = Callable[..., Workload]


def names() -> list[str]:
    """The built-in workloads, by name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(text: str) -> Workload:
    """The workload that `text` describes, in fp32. ValueError for an unknown name, option or value."""
    name, builder, options = _parse(text)
    if not callable(builder):
        raise ValueError(f"workload {text!r}: {name} must be a function, got {type(builder).__name__}")
    accepted = inspect.signature(builder).parameters
    training = {key: value for key, value in options.items() if key in TRAINING_OPTIONS}
    own = {key: value for key, value in options.items() if key not in TRAINING_OPTIONS}
    if unknown := sorted(own.keys() - accepted.keys()):
        raise ValueError(
            f"workload {text!r}: unknown option {', '.join(unknown)}; {name} takes "
            f"{', '.join(sorted(accepted.keys() - {'training'})) or 'none of its own'}, and training options "
            f"{', '.join(sorted(TRAINING_OPTIONS))}"
        )
    try:
        if "training" in accepted:
            defaults = accepted["training"].default
            base = defaults if isinstance(defaults, Training) else Training()
            workload = builder(training=replace(base, **training), **own)
        else:
            workload = builder(**own)
            if isinstance(workload, Workload):
                workload = replace(workload, training=replace(workload.training, **training))
    except (ValueError, TypeError) as error:
        raise ValueError(f"workload {text!r}: {error}") from error
    if not isinstance(workload, Workload):
        raise ValueError(f"workload {text!r}: {name} must return a Workload, got {type(workload).__name__}")
    return replace(workload, name=text)


def with_options(text: str, **options: Any) -> str:
    """The workload `text` with some options set anew: `gpt:size=tiny` and seed=3 give `gpt:size=tiny,seed=3`."""
    head, current = _split(text)
    merged = {**_parse_options(text, current), **options}
    return _join(head, merged)


def without_training_options(text: str, *, keep: Collection[str] = ()) -> str:
    """The workload `text` without the options that say how it is trained, but for those in `keep`."""
    head, current = _split(text)
    options = _parse_options(text, current)
    return _join(head, {k: v for k, v in options.items() if k not in TRAINING_OPTIONS or k in keep})


def _split(text: str) -> tuple[str, str]:
    """Into what names the builder, and the options."""
    if ".py:" in text:
        path, _, rest = text.partition(".py:")
        function, _, options = rest.partition(":")
        return f"{path}.py:{function}", options
    head, _, options = text.partition(":")
    return head, options


def _join(head: str, options: Mapping[str, Any]) -> str:
    written = ",".join(f"{key}={as_typed(value)}" for key, value in options.items())
    return f"{head}:{written}" if written else head


def _parse(text: str) -> tuple[str, Builder, dict[str, Any]]:
    head, options = _split(text)
    if ".py:" in text:
        builder = load_from_file(head)
        return head.rpartition(":")[2], builder, _parse_options(text, options, _hints(builder))
    if head not in names():
        raise ValueError(f"workload {text!r}: expected one of {', '.join(names())}, or path/to/file.py:builder")
    builder = importlib.import_module(f"harness.models.{head}").workload
    return head, builder, _parse_options(text, options, _hints(builder))


def _parse_options(text: str, options: str, hints: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ValueError(f"workload {text!r}: expected options as key=value, got {part!r}")
        parsed[key.strip()] = parse_value(value.strip(), hints.get(key.strip()))
    return parsed


def parse_value(text: str, hint: Any = None) -> bool | int | float | str | None:
    """`true`, `3`, `1e-3`, `none` as what they mean; anything else stays text, and so does what the annotation `hint`
    lists as such."""
    if text in _listed(hint):
        return text
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _hints(builder: Any) -> dict[str, Any]:
    return {**(annotations_of(builder) if callable(builder) else {}), **annotations_of(Training)}


def annotations_of(annotated: Any) -> dict[str, Any]:
    """The annotations of a function's parameters, or a class's fields; none where some name what only a type checker
    imports."""
    try:
        return get_type_hints(annotated)
    except (NameError, TypeError):
        return {}


def _listed(hint: Any) -> tuple[Any, ...]:
    """The values that an annotation lists one by one."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(value for member in get_args(hint) for value in _listed(member))
    return get_args(hint) if get_origin(hint) is Literal else ()
