"""Values as a user types them on the command line, in suites' labels and in messages: `none`, `true`, `1e-3`."""

from __future__ import annotations

from typing import Any


def as_typed(value: Any) -> str:
    """As it is typed: `none` and `false`, not None and False."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def quoted(value: Any) -> str:
    """As it is typed, and text in quotes, for messages that tell what was given."""
    return as_typed(value) if value is None or isinstance(value, bool) else repr(value)
