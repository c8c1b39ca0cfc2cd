"""What commands share: options that mean the same everywhere, and one line for bad input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.one_line import one_line

BAD_INPUT = 2

ResultsOption = Annotated[
    Path | None,
    typer.Option("--results", help="Directory for the results. Default: results/SUITE-TIME.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as JSON on standard output, nothing else.")]
NoUploadOption = Annotated[
    bool, typer.Option("--no-upload", help="Leave MLflow alone; `meshmark upload` does it later.")
]
SuiteRunOption = Annotated[
    str | None,
    typer.Option("--suite-run", metavar="ID", help="Which suite run. Default: the latest.", show_default=False),
]
JudgedResultsOption = Annotated[
    Path | None,
    typer.Option("--results", metavar="DIR", help="Take the run from here. Default: from MLflow.", show_default=False),
]
AcceptedOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where the accepted values lie. Default: accepted/ here, else at the root of the checkout.",
        show_default=False,
    ),
]
JudgedSuiteOption = Annotated[
    str | None,
    typer.Option("--suite", metavar="NAME", help="The latest run of this suite. Default: of any.", show_default=False),
]
DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A results directory.", show_default=False)]


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected an integer, got {text!r}") from None


def count(help_text: str) -> Any:
    """An option that is a number; whether it is a possible one, Layout and Measurement know."""
    return typer.Option(metavar="N", help=help_text, parser=_integer)


@contextmanager
def warning_line() -> Iterator[None]:
    """A store that does not take what the verdict is already known without costs a line."""
    try:
        yield
    except ConnectionError as error:
        print(f"meshmark: {one_line(error)}", file=sys.stderr)


@contextmanager
def bad_input() -> Iterator[None]:
    """Turns what is wrong with the user's input into one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"meshmark: {one_line(error)}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
