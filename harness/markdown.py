"""Text in Markdown: what was typed by somebody, or printed by something, stays the text that it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What begins a span, a link, an element, an entity or the next cell. An underscore between letters begins nothing.
_MARKUP = re.compile(r"[\\`*\[\]<>|~]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")
_BAR = re.compile(r"(?<!\\)\|")


def plain(text: str) -> str:
    """`text` on one line, with a backslash before every character that Markdown (GitHub's) would take for markup."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def plain_row(cells: Sequence[str]) -> str:
    """One line of a table whose cells are plain text."""
    return table_row([plain(cell) for cell in cells])


def table_row(cells: Sequence[str]) -> str:
    """One line of a table whose cells are Markdown. A `|` ends a cell even within code, so that it is escaped."""
    return "| " + " | ".join(_BAR.sub(r"\\|", cell) for cell in cells) + " |"


def code(text: str) -> str:
    """`text` as code within a line."""
    fence = _fence(text, 1)
    return f"{fence} {text} {fence}" if text.startswith("`") or text.endswith("`") else f"{fence}{text}{fence}"


def fenced(text: str, language: str = "text") -> list[str]:
    """The lines of a block that shows `text` as it is, whatever fences are in it."""
    fence = _fence(text, 3)
    return [f"{fence}{language}", text.rstrip(), fence]


def _fence(text: str, least: int) -> str:
    """More backticks than any run of them in `text` has."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    return "`" * max(least, longest + 1)
