"""Where the figures of a page come from: machine, versions, dates, commits and commands."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness import suite_file
from harness.markdown import code
from harness.measured_on import commit_of, measured_on
from harness.report import figure
from harness.result import RESULTS_FILE, Result

_SOFTWARE = ("os", "python", "torch", "numpy")


def provenance(results: Sequence[Result], *paths: Path) -> list[str]:
    """A line each. Where results were made by several versions or from several commits, all of them. Commands are told
    without the directories that they wrote to; where one was not written down its results have none."""
    environments = [result.environment for result in results if result.environment]
    versions = {name: dict.fromkeys(str(e[name]) for e in environments if e.get(name)) for name in _SOFTWARE}
    dates = sorted({time.strftime("%Y-%m-%d", time.gmtime(r.started)) for r in results if r.started})
    commits = dict.fromkeys(commit for environment in environments if (commit := commit_of(environment)))
    delay = "communication.delay_seconds"
    delays = sorted(result.metrics[delay] for result in results if delay in result.metrics)
    suites = dict.fromkeys(result.suite for result in results if result.suite)
    comparing = shlex.join(["meshmark", "compare", *(_shown(str(path)) for path in paths)])
    said = {
        "versions": ", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items() if found),
        "delay of an operation": _range([f"{figure(seconds, 1e3)} ms" for seconds in delays]),
        "date": _range(dates),
        "commit" if len(commits) < 2 else "commits": ", ".join(commits),
        "suite" if len(suites) < 2 else "suites": ", ".join(map(code, suites)),
        "commands": "; ".join(map(code, (*_commands(paths), comparing))),
    }
    return [*measured_on(results), *(f"{name}: {text or '-'}" for name, text in said.items())]


def _commands(paths: Iterable[Path]) -> list[str]:
    """Those that made the results."""
    directories = [path.parent if path.name == RESULTS_FILE else path for path in paths]
    given = [shlex.split(command) for directory in directories for command in suite_file.commands(directory)]
    return list(dict.fromkeys(shlex.join(map(_shown, words)) for words in given))


def _shown(word: str) -> str:
    """As it was typed; of a path from the root only the end, which means something elsewhere too."""
    return Path(word).name if Path(word).is_absolute() else word


def _range(values: Sequence[str]) -> str:
    """The first and the last."""
    return " to ".join(dict.fromkeys((*values[:1], *values[-1:])))
