"""Runs of cases for the gate's tests, nights of one suite on one machine, and the check of the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.regression import check_report
from harness.regression.accepted_values import Accepted
from harness.regression.check import Check, check
from harness.regression.history import CaseRun

FIRST_NIGHT = 1_735_689_600.0
DAY = 86_400.0
BYTES = "communication.bytes_per_step"
PLACE = ("native.ddp-data2-0", "cpu")
ACCEPTED = Accepted(values={PLACE: {BYTES: 1000.0}})
SLOWER = [1.0] * 20 + [1.1] * 8


def case_run(
    night: int = 0, seconds: float = 0.1, *, metrics: dict[str, float] | None = None, **fields: Any
) -> CaseRun:
    """One case in the suite run of a night; the canary takes 10 ms."""
    given: dict[str, Any] = {
        "case_id": "native.ddp-data2-0",
        "suite_run": f"smoke-{night:02}",
        "suite": "smoke",
        "started": FIRST_NIGHT + night * DAY,
        "name": "native.ddp data=2",
        "implementation": "native.ddp",
        "workload": "gpt",
        "precision": "fp32",
        "status": "ok",
        "reason": "",
        "explanation": "",
        "device": "cpu",
        "machine": "m1",
        "environment": "e1",
        "commit": "c0ffee00",
        "versions": {"torch": "2.13.0"},
        "metrics": {"step.median_seconds": seconds, "canary.seconds": 0.01, BYTES: 1000.0, **(metrics or {})},
    }
    return CaseRun(**{**given, **fields})


def nights(levels: Sequence[float], seed: int = 0, **fields: Any) -> list[CaseRun]:
    """One run a night, at each of the relative levels, with noise of 0.3 %; a new commit every night."""
    noise = np.random.default_rng(seed).normal(1.0, 0.003, len(levels))
    return [
        case_run(night, 0.1 * level * noise[night], **{"commit": f"{night:08x}", **fields})
        for night, level in enumerate(levels)
    ]


def checked(runs: list[CaseRun], accepted: Accepted = ACCEPTED) -> Check:
    """The check of the last night among the runs."""
    last = max(runs, key=lambda run: run.started).suite_run
    return check([run for run in runs if run.suite_run == last], runs, accepted)


def only(judged: Check) -> tuple[str, str]:
    """Its one case: the verdict, and why."""
    (case,) = judged.cases
    return case.verdict, "; ".join(check_report.reasons(case))
