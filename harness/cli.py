"""The command line: puts the commands of harness/commands together.

Nothing heavy is imported until a command needs it: ranks import this file again, and help should be instant.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from harness.commands import choosing, comparing, gate, links, looking, training
from harness.commands.arguments import BAD_INPUT
from harness.one_line import one_line

INTERRUPTED = 130

app = typer.Typer(
    name="meshmark",
    help=(
        "Run the same training work under many implementations and layouts, and hold each against one process.\n\n"
        "Start with [bold]meshmark list[/], then [bold]meshmark run smoke[/]. Exit code: 0 when every case is ok (or "
        "cannot run here for a stated reason), 1 when a case failed, diverged or ran out of time, 2 for bad input."
    ),
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(training.run)
app.command()(training.submit)
app.command("try")(training.try_one)
app.command("list")(looking.list_all)
app.command()(looking.inspect)
app.command()(looking.report)
app.command()(comparing.compare)
app.command()(choosing.choose)
app.command()(choosing.dashboard)
app.command()(links.links)
app.command()(gate.check)
app.command()(gate.accept)
app.command()(looking.upload)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Bad input gives one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        return int(app(given, prog_name="meshmark", standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        # A usage error of typer; its class has moved between typer's versions.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message().replace("Value error, ", "")  # a word of typer's own for wrong choices
        print(f"meshmark: {one_line(message)}", file=sys.stderr)
        return BAD_INPUT
