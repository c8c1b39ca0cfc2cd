"""Validation: everything about a case that can be wrong before any process starts, said in one line."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch

from harness import implementation, models
from harness.case import Case
from harness.precision import PRECISIONS
from harness.typed_values import quoted

T = TypeVar("T")


def check(cases: Sequence[Case]) -> None:
    """ValueError for the first case with an unknown workload, implementation, precision or option, or with an option's
    value of the wrong type. What a missing library hides is left to the run, which calls it unavailable."""
    workloads: set[str] = set()
    for case in cases:
        try:
            _check_fields(case)
            if case.workload not in workloads:
                _unless_library_missing(models.load, case.workload)
                workloads.add(case.workload)
            loaded = _unless_library_missing(implementation.load, case.implementation)
            if loaded is not None:
                check_options(case.implementation, loaded, case.options)
                _check_role(case, loaded)
        except ValueError as error:
            raise ValueError(f"case {case.label}, {case.layout}: {error}") from error


def check_device(device: str) -> None:
    """ValueError where ranks cannot train on `device` on this machine."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: expected a CUDA device on this machine, found none")


def _check_fields(case: Case) -> None:
    for name in ("workload", "implementation", "precision"):
        if not isinstance(getattr(case, name), str):
            raise ValueError(f"{name} must be text, got {getattr(case, name)!r}")
    if case.precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {case.precision!r}")


def _check_role(case: Case, loaded: type[implementation.Implementation]) -> None:
    """A floor in another role would be held against one process, and one that exchanges something is no floor."""
    if loaded.is_floor(case.options) and case.role != "floor":
        raise ValueError(f"it exchanges nothing and trains no model: expected the role floor, got {case.role}")
    if case.role == "floor" and not loaded.is_floor(case.options):
        raise ValueError("expected an implementation that exchanges nothing in the role floor, got one that does")


def is_floor(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the implementation `name` exchanges nothing under `options`. ValueError if there is none of that name."""
    loaded = _unless_library_missing(implementation.load, name)
    return loaded is not None and loaded.is_floor(options)


def _unless_library_missing(load: Callable[[str], T], text: str) -> T | None:
    """What `load` gives, or None where a third-party library is missing or fails while it is imported."""
    try:
        return load(text)
    except ValueError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ImportError):
            cause = cause.__cause__
        if cause is None:
            raise
        return None
    except Exception:
        return None


def options_from(texts: Mapping[str, str], name: str) -> dict[str, Any]:
    """Options of the implementation `name` from their values as text. ValueError if there is no such implementation."""
    loaded = _unless_library_missing(implementation.load, name)
    hints = {} if loaded is None else models.annotations_of(loaded.__init__)
    return {option: models.parse_value(text, hints.get(option)) for option, text in texts.items()}


def check_options(name: str, loaded: type[implementation.Implementation], options: Mapping[str, Any]) -> None:
    """ValueError for an option that `loaded` does not take, or a value that its annotation or it itself refuses."""
    known = implementation.options_of(loaded)
    if unknown := sorted(options.keys() - known.keys()):
        raise ValueError(f"option {', '.join(unknown)}: {name} takes {', '.join(sorted(known)) or 'no options'}")
    hints = models.annotations_of(loaded.__init__)
    for option, value in options.items():
        if option in hints and not allows(hints[option], value):
            raise ValueError(f"option {option}: {name} expects {described(hints[option])}, got {quoted(value)}")
    if missing := sorted(
        option for option, default in known.items() if default is inspect.Parameter.empty and option not in options
    ):
        raise ValueError(f"option {', '.join(missing)}: {name} has no default for it, got none")
    if reason := loaded.refused_options(options):
        raise ValueError(f"{name}: {reason}")


def allows(hint: Any, value: Any) -> bool:
    """Whether `value` is one that the annotation `hint` describes, where it describes plain values; else True."""
    origin = get_origin(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if origin in (Union, types.UnionType):
        return any(allows(member, value) for member in get_args(hint))
    if hint in (None, type(None)):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    return True


def described(hint: Any) -> str:
    """The annotation in words: `one of a, b`, `int or none`."""
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if origin in (Union, types.UnionType):
        return " or ".join(described(member) for member in get_args(hint))
    if hint in (None, type(None)):
        return "none"
    return getattr(hint, "__name__", str(hint))
