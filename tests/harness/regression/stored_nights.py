"""Nights of one case in a results directory and in the store, where the gate finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import tracking
from harness.case import Case
from harness.layout import Layout
from harness.result import Result, append

NIGHT = 1_735_689_600.0
BYTES = "communication.bytes_per_step"
CASE = Case(workload="gpt", implementation="native.ddp", layout=Layout(data=2), precision="fp64")
ENVIRONMENT = {
    "device": {"kind": "cpu"},
    "machine_fingerprint": "m1",
    "environment_fingerprint": "e1",
    "torch": "2.13.0",
    "threads_per_rank": 1,
    "libraries": {"deepspeed": "0.19.8"},
    "commit": "c0ffee",
    "dirty": True,
    "canary": {"seconds": 0.01, "matmul_seconds": 0.005},
}


def results_of(night: int, **changes: Any) -> Path:
    """A results directory with one case."""
    directory = Path(f"night-{night}")
    directory.mkdir()
    given = {
        "case": CASE,
        "status": "ok",
        "environment": ENVIRONMENT,
        "metrics": {"step.median_seconds": 0.1, BYTES: 1000.0},
        "samples": {"losses": [3.0, 2.5], "step_seconds": [[0.1], [0.1]]},
        "suite": "smoke",
        "suite_run": f"smoke-{night}",
        "started": NIGHT + night,
        "duration_seconds": 1.0,
    }
    append(directory, Result(**{**given, **changes}))
    return directory


def uploaded(night: int, **changes: Any) -> Path:
    directory = results_of(night, **changes)
    assert tracking.upload(directory).failed == 0
    return directory


def case_tags() -> dict[str, dict[str, Any]]:
    return {run["tags.meshmark.suite_run"]: run for run in tracking.read_runs("meshmark/gpt")}
