"""The built-in workloads: one module each, whose `workload(training, **options)` builds it.

A workload is written as text, so that a case can be stored, compared and typed: `gpt`, `gpt:size=17m,tied=true`, or
`path/to/file.py:builder` for a user's own, with the same options behind a second colon. An option that names a field
of Training goes there, every other one to the builder.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness.loading import load_from_file
from harness.workload import TRAINING_OPTIONS, Training, Workload

Builder = Callable[..., Workload]


def names() -> list[str]:
    """The built-in workloads, by name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(text: str) -> Workload:
    """The workload that `text` describes, in fp32. ValueError for an unknown name, option or value."""
    name, builder, options = _parse(text)
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


def _parse(text: str) -> tuple[str, Builder, dict[str, Any]]:
    if ".py:" in text:
        path, _, rest = text.partition(".py:")
        function, _, options = rest.partition(":")
        return function, load_from_file(f"{path}.py:{function}"), _parse_options(text, options)
    name, _, options = text.partition(":")
    if name not in names():
        raise ValueError(f"workload {text!r}: expected one of {', '.join(names())}, or path/to/file.py:builder")
    return name, importlib.import_module(f"harness.models.{name}").workload, _parse_options(text, options)


def _parse_options(text: str, options: str) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ValueError(f"workload {text!r}: expected options as key=value, got {part!r}")
        parsed[key.strip()] = parse_value(value.strip())
    return parsed


def parse_value(text: str) -> bool | int | float | str | None:
    """`true`, `3`, `1e-3`, `none` as what they mean; anything else stays text."""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
