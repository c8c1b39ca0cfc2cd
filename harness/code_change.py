"""How many lines a strategy asks of its user: an implementation's training code beside plain training on one rank."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from typing import Any

from harness import implementation
from harness.implementation import Implementation

PLAIN_TRAINING = "native.floor"
"""The compute-only floor: what a user has before parallel training, written in the same form."""
_SEAM = ("__init__", "train_step")


def num_changed_lines(kind: type[Implementation]) -> int | None:
    """The lines by which `kind` differs from plain training: altered, added or taken away. None if there is no source.

    Counted are the bodies of `__init__` and `train_step`, with whatever functions of the same file they use. A line is
    a logical one, however it is wrapped and indented; comments, docstrings and blank lines are none.
    """
    try:
        plain, own = training_lines(implementation.load(PLAIN_TRAINING)), training_lines(kind)
    except (OSError, TypeError):  # typed into a console, or built by a program
        return None
    changes = SequenceMatcher(None, plain, own, autojunk=False).get_opcodes()
    return sum(
        max(plain_end - plain_start, end - start)
        for tag, plain_start, plain_end, start, end in changes
        if tag != "equal"
    )


def training_lines(kind: type[Implementation]) -> list[str]:
    """The logical lines that make up the training of `kind`."""
    lines: list[str] = []
    waiting: list[Callable[..., Any]] = [getattr(kind, name) for name in _SEAM]
    seen = {function.__qualname__ for function in waiting}
    for function in waiting:  # grows while it is walked through
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        _remove_docstrings(tree)
        # How the harness calls the two is not the user's line.
        parts = tree.body if isinstance(tree, ast.FunctionDef) and function.__name__ in _SEAM else [tree]
        lines += [line.strip() for part in parts for line in ast.unparse(part).splitlines()]
        for used in _used(function, tree, kind):
            if used.__qualname__ not in seen:
                seen.add(used.__qualname__)
                waiting.append(used)
    return lines


def _used(function: Callable[..., Any], tree: ast.AST, kind: type) -> Iterator[Callable[..., Any]]:
    """The functions of the same file that `function` names: its module's, and `kind`'s own."""
    module = inspect.getmodule(function)
    for node in ast.walk(tree):
        found = None
        if isinstance(node, ast.Name):
            found = getattr(module, node.id, None)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found = inspect.getattr_static(kind, node.attr, None)
            found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if inspect.isfunction(found) and inspect.getmodule(found) is module:
            yield found


def _remove_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
