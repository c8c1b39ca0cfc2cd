"""Blocks: what pages are made of, as plain values that the page's script shows. Text stays text: the script never takes
any of it for markup. Colours are names (`@zero_1`), which mean one thing on all pages and are looked up by theme."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

Block = Mapping[str, Any]
Cell = Mapping[str, Any]
Trace = Mapping[str, Any]

# Whose code it is shows in marks and dashes, what it does in colours.
SYMBOLS = {"native": "circle", "torch": "square", "deepspeed": "diamond", "fairscale": "triangle-up"}
DASHES = {"native": "solid", "torch": "dash", "deepspeed": "dot", "fairscale": "dashdot"}


def text(words: str, *, quiet: bool = False) -> Block:
    return {"kind": "text", "text": words, "quiet": quiet}


def heading(words: str, note: str = "") -> Block:
    return {"kind": "heading", "text": words, "note": note}


def more(words: str, *blocks: Block) -> Block:
    """Blocks that are folded away under `words`; on paper they are unfolded."""
    return {"kind": "more", "text": words, "blocks": list(blocks)}


def missing(what: str, command: str) -> Block:
    """What is not known, and the command that would measure it."""
    return {"kind": "missing", "text": what, "command": command}


def figure(
    title: str, traces: Sequence[Trace], layout: Mapping[str, Any], *, note: str = "", height: int = 340
) -> Block:
    """A Plotly figure; `layout` on top of the page's own."""
    return {
        "kind": "figure",
        "title": title,
        "note": note,
        "traces": list(traces),
        "layout": dict(layout),
        "height": height,
    }


def table(columns: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], *, title: str = "") -> Block:
    """`columns` from `column`, `rows` from `row`; people sort it by any column."""
    return {"kind": "table", "title": title, "columns": list(columns), "rows": list(rows)}


def column(
    title: str, *, unit: str = "", numeric: bool = True, help: str = "", secondary: bool = False
) -> Mapping[str, Any]:
    """`secondary` columns go first where there is little room."""
    return {"title": title, "unit": unit, "numeric": numeric, "help": help, "secondary": secondary}


def row(*cells: Cell, greyed: bool = False) -> Mapping[str, Any]:
    return {"cells": list(cells), "greyed": greyed}


def cell(value: float | str | None, shown: str | None = None, **more: Any) -> Cell:
    """`value` is what it is sorted by. How it looks say `bar` and `tick` (fractions of the column's width), `colour`,
    `mark` (a library's symbol), `badge` (ok, bad, none), `under` (a second line) and `tip`."""
    return {"value": value, "text": ("-" if value is None else str(value)) if shown is None else shown, **more}


def bars(title: str, unit: str, parts: Sequence[str], rows: Sequence[Mapping[str, Any]], *, note: str = "") -> Block:
    """Stacked bars, one or two a row. `parts` are names of colours; a row has `label`, `colour`, `mark` and `stacks`,
    each with its `name`, `values` (one a part, None where not known), `peak` and whether it is `foreseen`."""
    return {"kind": "bars", "title": title, "unit": unit, "parts": list(parts), "rows": list(rows), "note": note}


def plotly_text(words: str) -> str:
    """Text for a figure, which takes some markup for what it is elsewhere."""
    return html.escape(words, quote=False)
