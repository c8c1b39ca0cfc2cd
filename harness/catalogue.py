"""The catalogue: which suites, implementations and workloads there are, and what cannot be used here and why."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from harness import implementation, models, suites


def suites_table() -> Table:
    """One row a suite; a broken one shows what is wrong with it."""
    table = _table("suites  (meshmark run NAME)", "name", "cases", "what for")
    for name in suites.names():
        try:
            suite = suites.load(name)
        except ValueError as error:
            table.add_row(name, "-", Text(str(error), style="red"))
        else:
            table.add_row(name, str(len(suite.cases)), suite.description)
    return table


def implementations_table() -> Table:
    """One row an implementation, available or not."""
    table = _table(
        "implementations  (meshmark try NAME --data 2 --option K=V)", "name", "strategy", "here", "options and defaults"
    )
    for name in implementation.names():
        try:
            loaded = implementation.load(name)
            missing = loaded.unavailable()
        except Exception as error:  # whatever a third-party library raises while it is imported
            table.add_row(name, "-", _availability(f"{type(error).__name__}: {error}"), "-")
        else:
            options = _written(implementation.options_of(loaded))
            table.add_row(name, loaded.strategy, _availability(missing), options)
    return table


def workloads_table() -> Table:
    """One row a built-in workload."""
    table = _table("workloads  (--workload NAME:K=V,K=V)", "name", "what", "options and defaults")
    for name in models.names():
        module = importlib.import_module(f"harness.models.{name}")
        about = (inspect.getdoc(module) or "").partition("\n\n")[0].replace("\n", " ")
        table.add_row(name, about, builder_options(module))
    return table


def builder_options(module: ModuleType) -> str:
    """The options of a workload module's builder: `size=tiny`, and `size=tiny|17m|...` where the module lists the
    choices under the option's plural, `SIZES`."""
    shown: dict[str, Any] = {}
    for name, parameter in inspect.signature(module.workload).parameters.items():
        if name == "training" or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        choices = getattr(module, f"{name.upper()}S", None)
        shown[name] = parameter.default if choices is None else "|".join(map(str, choices))
    return _written(shown)


def _written(options: Mapping[str, Any]) -> str:
    """`bucket_mib=25 reduction=all_reduce overlap=true`, as they are typed on the command line."""
    return " ".join(f"{name}={_word(value)}" for name, value in options.items())


def _word(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "(needed)"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _availability(missing: str | None) -> Text:
    if missing is None:
        return Text("available", style="green")
    return Text(f"unavailable: {' '.join(missing.split())}", style="yellow")


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for header in headers:
        table.add_column(header, justify="right" if header == "cases" else "left", overflow="fold")
    return table
