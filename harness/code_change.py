"""How much our use of a library differs from plain training on one rank: an implementation's training code beside the
same of plain training. No count of what a user would change: what passes options on and measures is in it, too."""

from __future__ import annotations

import ast
import inspect
import textwrap
from difflib import SequenceMatcher

from harness import implementation
from harness.implementation import Implementation

PLAIN_TRAINING = "native.floor"
"""The compute-only floor, as it runs without options: training before it is parallel, written in the same form."""


def num_changed_lines(kind: type[Implementation]) -> int | None:
    """The lines by which the bodies of `__init__` and `train_step` differ from plain training's: altered, added or
    taken away. None if there is no source.

    A line is a logical one, however it is wrapped and indented; comments, docstrings and blank lines are none, and
    whatever is called counts as the call.
    """
    try:
        plain = training_lines(implementation.load(PLAIN_TRAINING), leaves_out_options=True)
        own = training_lines(kind)
    except (OSError, TypeError):  # typed into a console, or built by a program
        return None
    changes = SequenceMatcher(None, plain, own, autojunk=False).get_opcodes()
    return sum(
        max(plain_end - plain_start, end - start)
        for tag, plain_start, plain_end, start, end in changes
        if tag != "equal"
    )


def training_lines(kind: type[Implementation], *, leaves_out_options: bool = False) -> list[str]:
    """The logical lines of the bodies of `__init__` and `train_step`; on request without what runs only `if` an option
    is given."""
    lines = []
    for method in (kind.__init__, kind.train_step):
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
        assert isinstance(function, ast.FunctionDef), f"{method.__qualname__} is no plain function"
        for node in ast.walk(function):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        if leaves_out_options:
            options = {option.arg for option in function.args.kwonlyargs}
            function.body = [s for s in function.body if not (isinstance(s, ast.If) and _name(s.test) in options)]
        lines += [line.strip() for statement in function.body for line in ast.unparse(statement).splitlines()]
    return lines


def _name(expression: ast.expr) -> str | None:
    return expression.id if isinstance(expression, ast.Name) else None
