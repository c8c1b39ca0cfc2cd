"""Micro-benchmarks: some of them, as `nox -s micro` runs them, and their way into MLflow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli, micro_record, tracking

ROOT = Path(__file__).resolve().parents[2]


def test_from_the_ranks_clocks_to_the_store(
    tmp_path: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = tmp_path / "latest.json"
    chosen = "(all_reduce and 4KiB and world2) or (schedule and 1f1b)"
    # A process of a parallel run of tests is told so by its environment, and would not time anything.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "suites/micro", "-q", "-k", chosen, f"--benchmark-json={session}"],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not finished.returncode, finished.stdout[-3000:]
    benchmarks = {entry["name"]: entry["stats"] for entry in json.loads(session.read_text())["benchmarks"]}
    in_ranks = {name: stats for name, stats in benchmarks.items() if "all_reduce" in name}
    assert len(in_ranks) == 4
    assert all(stats["rounds"] == 30 for stats in in_ranks.values())
    assert all(1e-6 < stats["median"] < 0.5 for stats in in_ranks.values()), "what ranks measured, and no round trips"
    assert len(benchmarks) - len(in_ranks) == 2

    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    for expected in ("1 runs uploaded, 0 already there", "0 runs uploaded, 1 already there"):
        assert cli.main(["upload", str(session), "--tracking-uri", uri]) == 0
        assert expected in capsys.readouterr().out
    (run,) = tracking.read_runs(micro_record.MICRO_EXPERIMENT, tracking_uri=uri)
    median = next(stats["median"] for name, stats in in_ranks.items() if "ring" in name)
    assert run["metrics.median_seconds/collective/all_reduce by ring-4KiB-world2"] == pytest.approx(median)
    assert run["metrics.benchmarks"] == 6


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"datetime": "yesterday"}'])
def test_what_is_no_session_is_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert cli.main(["upload", str(path)]) == 2
    error = capsys.readouterr().err
    assert "x.json: expected a session of pytest-benchmark, got" in error
    assert error.count("\n") == 1
