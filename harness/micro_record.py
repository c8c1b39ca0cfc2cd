"""Micro-benchmarks as a tracker shows them: one run for each session that pytest-benchmark has written down."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.run_record import SOFTWARE, RunRecord

MICRO_EXPERIMENT = "meshmark/micro"
ENVIRONMENT = "meshmark_environment"  # in a session's file, as harness.environment describes it
_FINGERPRINTS = ("machine_fingerprint", "environment_fingerprint")
_FIGURES = ("median", "iqr", "min")  # of each benchmark, in seconds


def is_session(path: Path) -> bool:
    """Whether `path` looks like a file of pytest-benchmark's, rather than a results directory."""
    return path.is_file() and path.suffix == ".json"


def read(path: Path) -> RunRecord:
    """The record of the session in `path`. ValueError if it is none."""
    text = path.read_text(encoding="utf-8")
    try:
        data: dict[str, Any] = json.loads(text)
        began = datetime.fromisoformat(data["datetime"]).timestamp()
        benchmarks = {_key(benchmark["name"]): benchmark["stats"] for benchmark in data["benchmarks"]}
        metrics = {
            f"{figure}_seconds/{name}": float(stats[figure])
            for name, stats in benchmarks.items()
            for figure in _FIGURES
        }
        machine, commit, environment = data["machine_info"], data["commit_info"], data.get(ENVIRONMENT, {})
        fingerprints = {name: str(environment[name]) for name in _FINGERPRINTS if environment.get(name)}
        software = {f"environment.{name}": str(environment[name]) for name in SOFTWARE if environment.get(name)}
        ended = began + sum(float(stats["total"]) for stats in benchmarks.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: expected a session of pytest-benchmark, got {reason}") from error
    if not benchmarks:
        raise ValueError(f"{path}: expected a session of pytest-benchmark with some benchmarks, got none")
    name = f"micro-{data['datetime']}"
    return RunRecord(
        experiment=MICRO_EXPERIMENT,
        suite_run=name,
        case_id="",
        name=name,
        tags={
            "suite": "micro",
            "status": "ok",
            "commit": str(commit.get("id", "")),
            "dirty": json.dumps(bool(commit.get("dirty"))),
            "machine": str(machine.get("node", "")),
            "device": "cpu",
            **fingerprints,
        },
        params={
            "machine.cpu": str((machine.get("cpu") or {}).get("brand_raw", machine.get("processor", ""))),
            "environment.python": str(machine.get("python_version", "")),
            **software,
        },
        metrics={"benchmarks": float(len(benchmarks)), **metrics},
        artifacts={"benchmarks.json": text},
        finished=True,
        started=began,
        ended=ended,
    )


def _key(name: str) -> str:
    """`test_collective[all_reduce-ring-4KiB-world2]` as collective/all_reduce-ring-4KiB-world2."""
    stem, _, parameters = name.removeprefix("test_").rstrip("]").partition("[")
    return re.sub(r"[^\w./: -]+", "_", f"{stem}/{parameters}" if parameters else stem)
