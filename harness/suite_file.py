"""The suite file: what a results directory says of its run: the suite, its name in the tracker, and which commands
wrote there."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SUITE_FILE = "suite.json"


def begin(suite: str, directory: Path, *, resume: bool, command: str | None = None) -> str:
    """The name of this suite run: written down at its start, and found again by a resume, beside the `command` that was
    given. A file that does not hold one is written anew."""
    before = _read(directory) if resume else {}
    name = str(before.get("suite_run") or f"{suite}-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    kept: dict[str, Any] = {"suite": suite, "suite_run": name}
    # Of a run that was begun without its command what was resumed is not all.
    earlier = _commands(before) if before else []
    if command is not None and earlier is not None:
        kept["commands"] = list(dict.fromkeys([*earlier, command]))
    path = directory / SUITE_FILE
    written = path.with_suffix(".new")
    written.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    written.replace(path)  # whole or not at all
    return name


def commands(directory: Path) -> list[str]:
    """Those that wrote the directory's results, in order; none where that was not written down."""
    return _commands(_read(directory)) or []


def _commands(kept: dict[str, Any]) -> list[str] | None:
    found = kept.get("commands")
    return [str(command) for command in found] if isinstance(found, list) else None


def _read(directory: Path) -> dict[str, Any]:
    """What the file holds, if it names a run."""
    try:
        kept = json.loads((directory / SUITE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) and "suite_run" in kept else {}
