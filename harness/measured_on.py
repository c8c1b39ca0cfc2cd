"""What figures were measured on, in words, the same on every page: device, cores, versions, commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.result import Result

_COMMIT_LETTERS = 10


def device_of(environment: Mapping[str, Any]) -> str:
    """`a processor, 2 cores`, and `(4 logical)` where these are others; cores where ranks share them."""
    device = environment.get("device") or {}
    logical = environment.get("logical_cores")
    cores = environment.get("physical_cores") or logical
    counted = ""
    if cores and device.get("kind", "cpu") == "cpu":
        counted = f"{cores} cores" if logical in (None, cores) else f"{cores} cores ({logical} logical)"
    return ", ".join(part for part in (str(device.get("name") or ""), counted) if part)


def commit_of(environment: Mapping[str, Any]) -> str:
    """`0123456789`, or `0123456789 with local changes`; empty where it is not known."""
    commit = str(environment.get("commit") or "")[:_COMMIT_LETTERS]
    return f"{commit} with local changes" if commit and environment.get("dirty") else commit


def measured_on(results: Sequence[Result]) -> list[str]:
    """The machine and the settings behind the figures, a line for each that differs; none where no case came so far."""
    lines: dict[str, None] = {}
    for environment in (result.environment for result in results if result.environment):
        threads, torch = environment.get("threads_per_rank"), environment.get("torch")
        parts = [
            device_of(environment),
            f"{threads} thread(s) a rank" if threads else "",
            f"torch {torch}" if torch else "",
        ]
        if any(parts):
            lines[", ".join(part for part in parts if part)] = None
    libraries = [f"{name} {version}" for name, version in _libraries(results).items()]
    return [f"measured on: {', '.join([line, *libraries])}" for line in lines]


def _libraries(results: Sequence[Result]) -> dict[str, str]:
    """Which versions of third-party libraries the cases ran with; each case imports its own."""
    versions: dict[str, list[str]] = {}
    for result in results:
        for name, version in (result.environment.get("libraries") or {}).items():
            if version not in versions.setdefault(name, []):
                versions[name].append(version)
    return {name: " and ".join(found) for name, found in sorted(versions.items())}
