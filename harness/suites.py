"""Suites: loading one by name or from a file, and choosing some of its cases."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import pkgutil
import traceback
from dataclasses import replace
from pathlib import Path

from harness.case import Case, Suite
from harness.loading import load_from_file


def names() -> list[str]:
    """Every suite found under suites/, by name."""
    package = importlib.import_module("suites")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg)


def load(text: str) -> Suite:
    """The suite named `smoke` (`suite` in `suites/smoke.py`), `path/to/file.py` (its `suite`) or
    `path/to/file.py:name`. ValueError, in one line, for an unknown name, a file that cannot be imported, or a `suite`
    that is none."""
    if text.endswith(".py") or ".py:" in text:
        where = text if ".py:" in text else f"{text}:suite"
    elif text in names():
        where = f"{Path(next(iter(importlib.import_module('suites').__path__))) / text}.py:suite"
    else:
        raise ValueError(f"suite {text!r}: expected one of {', '.join(names())}, or path/to/file.py")
    path, _, name = where.rpartition(":")
    try:
        suite = load_from_file(where)
    except ValueError as error:
        raise ValueError(_explained(path, error)) from error
    if not isinstance(suite, Suite):
        raise ValueError(f"{path}: {name} must be a Suite, got {type(suite).__name__}")
    return suite


def _explained(path: str, error: ValueError) -> str:
    """The error of loading `path`, with the line of that file it comes from and the fields there are."""
    cause = error.__cause__
    if cause is None:
        return str(error)
    if isinstance(cause, SyntaxError):
        return f"{path}, line {cause.lineno}: expected Python, got {cause.msg}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(cause.__traceback__)
        if Path(frame.filename).resolve() == Path(path).resolve()
    ]
    message = f"{path}, line {lines[-1]}: {cause}" if lines else f"{path}: {type(cause).__name__}: {cause}"
    for made in (Case, Suite):
        if isinstance(cause, TypeError) and f"{made.__name__}.__init__()" in message:
            message += f"; {made.__name__} takes {', '.join(inspect.signature(made).parameters)}"
    return message


def description(case: Case) -> str:
    """What `--only` is matched against: `native.ddp reduction=ring data=2 gpt:size=tiny fp32`, then the topology and
    the name of the comparison, if it has them."""
    topology = "" if case.topology is None else str(case.topology)
    words = (case.label, case.layout, case.workload, case.precision, topology, case.comparison)
    return " ".join(str(word) for word in words if str(word))


def select(suite: Suite, pattern: str) -> Suite:
    """The suite with those cases only whose description contains `pattern`, in which `*` and `?` are wildcards.
    ValueError if there is none."""
    chosen = tuple(case for case in suite.cases if fnmatch.fnmatchcase(description(case), f"*{pattern}*"))
    if not chosen:
        raise ValueError(
            f"--only {pattern!r} matches none of the {len(suite.cases)} cases of {suite.name}; "
            f"the first one reads {description(suite.cases[0])!r}"
        )
    return replace(suite, cases=chosen, num_left_out=suite.num_left_out + len(suite.cases) - len(chosen))
