"""One line of whatever was told."""

from __future__ import annotations


def one_line(told: object) -> str:
    """The text of `told`, an error say, without line breaks; an error that tells nothing by the name of its kind."""
    return " ".join(str(told).split()) or (type(told).__name__ if isinstance(told, BaseException) else "")
