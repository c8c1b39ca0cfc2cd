"""The catalogue: which suites, implementations and workloads there are, and what cannot be used here and why."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness import implementation, models, suites, support
from harness.typed_values import as_typed


def suites_table() -> Table:
    """One row a suite; a broken one shows what is wrong with it."""
    table = _table("suites  (meshmark run NAME)", "name", "cases", "what for")
    for name in suites.names():
        try:
            suite = suites.load(name)
        except ValueError as error:
            _add(table, name, "-", Text(str(error), style="red"))
        else:
            _add(table, name, str(len(suite.cases)), suite.description)
    return table


def implementations_table() -> RenderableType:
    """One row an implementation, and below them why some cannot be used here."""
    table = _table(
        "implementations  (meshmark try NAME --data 2 --option K=V)",
        "name",
        "strategy",
        "degrees",
        "here",
        "options and defaults",
    )
    reasons: dict[str, list[str]] = {}
    for name in implementation.names():
        try:
            loaded = implementation.load(name)
            missing = loaded.unavailable()
        except Exception as error:  # whatever a third-party library raises while it is imported
            missing = f"{type(error).__name__}: {error}"
            _add(table, name, "-", "-", _availability(missing), "-")
        else:
            degrees = ", ".join(support.axes(loaded)) or "-"
            _add(table, name, loaded.strategy, degrees, _availability(missing), implementation_options(loaded))
        if missing is not None:
            reasons.setdefault(" ".join(missing.split()), []).append(name)
    notes = [Text(f" {', '.join(names)}: {reason}", style="yellow") for reason, names in reasons.items()]
    return Group(table, *notes, Text(""))


def refusals_table() -> Table:
    """One row a kind of workload that an implementation refuses, beside whole layouts."""
    table = _table("refused before any process starts", "name", "workload", "because")
    for name in implementation.names():
        try:
            loaded = implementation.load(name)
        except Exception:  # implementations_table tells
            continue
        for kind, reason in support.refusals(loaded):
            _add(table, name, f"awkward:kind={kind}", reason)
    return table


def workloads_table() -> Table:
    """One row a built-in workload."""
    table = _table("workloads  (--workload NAME:K=V,K=V)", "name", "what", "options and defaults")
    for name in models.names():
        module = importlib.import_module(f"harness.models.{name}")
        about = (inspect.getdoc(module) or "").partition("\n\n")[0].replace("\n", " ")
        _add(table, name, about, builder_options(module))
    return table


def implementation_options(loaded: type[implementation.Implementation]) -> str:
    """An implementation's options with their defaults, and the other choices where the annotation lists them."""
    try:
        hints = get_type_hints(loaded.__init__)
    except NameError:  # an annotation that only a type checker imports
        hints = {}
    shown: dict[str, Sequence[Any]] = {}
    for name, default in implementation.options_of(loaded).items():
        choices = get_args(hints.get(name)) if get_origin(hints.get(name)) is Literal else ()
        shown[name] = (default, *(choice for choice in choices if choice != default))
    return _written(shown)


def builder_options(module: ModuleType) -> str:
    """The options of a workload module's builder, and the choices where the module lists them under the option's
    plural: `SIZES` for `size`."""
    shown: dict[str, Sequence[Any]] = {}
    for name, parameter in inspect.signature(module.workload).parameters.items():
        if name == "training" or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        choices = getattr(module, f"{name.upper()}S", ())
        shown[name] = (parameter.default, *(choice for choice in choices if choice != parameter.default))
    return _written(shown)


def _written(options: Mapping[str, Sequence[Any]]) -> str:
    """One option a line, as it is typed on the command line, its default first: `size=tiny | 17m | 30m`."""
    return "\n".join(f"{name}={' | '.join(map(_word, choices))}" for name, choices in options.items())


def _word(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "(needed)"
    return as_typed(value)


def _availability(missing: str | None) -> Text:
    if missing is None:
        return Text("available", style="green")
    return Text("unavailable", style="yellow")


def _table(title: str, *headers: str) -> Table:
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    for header in headers:
        table.add_column(header, justify="right" if header == "cases" else "left", overflow="fold")
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """A row of text, which may look like markup: docstrings, descriptions and defaults are other people's."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
