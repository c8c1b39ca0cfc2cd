"""Checks of the options that several workloads take; each raises a ValueError that says what was expected."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from harness.typed_values import quoted


def check_positive_integers(**options: Any) -> None:
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {quoted(value)}")


def check_boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {quoted(value)}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {quoted(value)}")
