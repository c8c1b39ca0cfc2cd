"""Accepted values: what exact figures of each case must be, in a text file of the repository, one line a figure.

    native.ddp-data2-0f3c2a91b4 cpu communication.bytes_per_step 169984
    native.ddp-data2-0f3c2a91b4 cpu accepted_time 2030-01-01T12:00:00Z
    deepspeed.zero-data2-5b1d07e6aa cpu accepted_absence 2030-01-01T12:00:00Z

The second line says that step times are as they should be from that suite run on, the third that the case, which had
run before, need not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

DIRECTORY = Path("accepted")
ACCEPTED_TIME = "accepted_time"
ACCEPTED_ABSENCE = "accepted_absence"
_HEADER = "# What `meshmark check` holds {suite} against; `meshmark accept` writes it: case, device, figure, value.\n"

Place = tuple[str, str]  # case id, device


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """`values` by place and figure; `times` and `absences` by place, in seconds since the epoch; `file` is where they
    were looked for."""

    values: Mapping[Place, Mapping[str, float]] = field(default_factory=dict)
    times: Mapping[Place, float] = field(default_factory=dict)
    absences: Mapping[Place, float] = field(default_factory=dict)
    file: Path | None = field(default=None, compare=False)


def directory_at_hand(given: Path | None = None) -> Path:
    """`given`; else accepted/ here, or where there is none, that of the checkout around the current directory."""
    if given is not None or DIRECTORY.is_dir():
        return given or DIRECTORY
    here = Path.cwd()
    root = next((directory for directory in (here, *here.parents) if (directory / ".git").exists()), here)
    return DIRECTORY if root == here else root / DIRECTORY


def file_of(suite: str, directory: Path = DIRECTORY) -> Path:
    return directory / f"{suite}.txt"


def read(path: Path) -> Accepted:
    """What the file holds; nothing where there is none. ValueError, with its number, for a line that is not like the
    above."""
    values: dict[Place, dict[str, float]] = {}
    dates: dict[str, dict[Place, float]] = {ACCEPTED_TIME: {}, ACCEPTED_ABSENCE: {}}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            case_id, device, figure, text = line.split()
            if figure in dates:
                dates[figure][case_id, device] = datetime.fromisoformat(text).timestamp()
            else:
                values.setdefault((case_id, device), {})[figure] = _finite(text)
        except ValueError:
            raise ValueError(f"{path}, line {number}: expected `case device figure value`, got {line!r}") from None
    return Accepted(values=values, times=dates[ACCEPTED_TIME], absences=dates[ACCEPTED_ABSENCE], file=path)


def write(path: Path, suite: str, accepted: Accepted) -> None:
    """Replaces the file, sorted, so that a change of one figure is a change of one line."""
    lines = [
        f"{case_id} {device} {figure} {_shown(value)}\n"
        for (case_id, device), of_place in accepted.values.items()
        for figure, value in of_place.items()
    ]
    lines += [
        f"{case_id} {device} {kind} {datetime.fromtimestamp(time, UTC).isoformat().replace('+00:00', 'Z')}\n"
        for kind, dates in ((ACCEPTED_TIME, accepted.times), (ACCEPTED_ABSENCE, accepted.absences))
        for (case_id, device), time in dates.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(_HEADER.format(suite=suite) + "".join(sorted(lines)), encoding="utf-8")
    written.replace(path)  # whole or not at all


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _shown(value: float) -> str:
    """Every digit; counts as counts."""
    return str(int(value)) if value.is_integer() else repr(value)
