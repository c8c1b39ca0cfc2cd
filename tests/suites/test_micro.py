"""Micro-benchmarks: some of them, as `nox -s micro` runs them, and their way into MLflow."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli, environment, micro_record, tracking

ROOT = Path(__file__).resolve().parents[2]


def test_from_the_ranks_clocks_to_the_store(
    tmp_path: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = tmp_path / "latest.json"
    chosen = "(all_reduce and 4KiB and world2) or (schedule and 1f1b)"
    # A process of a parallel run of tests is told so by its environment, and would not time anything.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "suites/micro", "-q", "-k", chosen, f"--benchmark-json={session}"],
        cwd=ROOT,
        env=variables,
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
    here = environment.describe("cpu")
    assert run["tags.machine_fingerprint"] == here["machine_fingerprint"], "that of every suite's cases"
    # The session's own process has imported other libraries than this one, and ranks have settings that it has not.
    told = json.loads(session.read_text())[micro_record.ENVIRONMENT]
    software = {name: here[name] for name in ("os", "python", "torch", "numpy", "malloc", "variables")}
    software |= {"libraries": told["libraries"], "threads_per_rank": 1}
    assert run["tags.environment_fingerprint"] == environment.environment_fingerprint(software)
    assert run["params.environment.torch"] == here["torch"]
    assert run["params.environment.threads_per_rank"] == "1"
    assert run["tags.device"] == "cpu"


SESSION = {
    "datetime": "2030-01-01T00:00:00",
    "machine_info": {"node": "here", "python_version": "3.11.7", "processor": "p"},
    "commit_info": {"id": "c0ffee", "dirty": False},
    "benchmarks": [{"name": "test_x", "stats": {"median": 1.0, "iqr": 0.1, "min": 0.9, "total": 5.0}}],
}


def test_a_session_has_the_tags_of_other_runs(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    path.write_text(json.dumps({**SESSION, micro_record.ENVIRONMENT: environment.describe("cpu")}))
    own, here = micro_record.read(path), environment.describe("cpu")
    shared = ("machine_fingerprint", "environment_fingerprint")
    assert [own.tags[name] for name in shared] == [here[name] for name in shared]
    assert (own.tags["commit"], own.tags["dirty"], own.tags["device"]) == ("c0ffee", "false", "cpu")
    assert own.params["environment.torch"] == here["torch"]


def test_a_session_that_says_nothing_of_it_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    path.write_text(json.dumps(SESSION))
    own = micro_record.read(path)
    assert "machine_fingerprint" not in own.tags
    assert own.params["environment.python"] == "3.11.7"


def test_a_tracker_that_is_down_costs_the_session_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nox", reason="nox is not installed here")
    from nox.command import CommandFailed

    specification = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert specification is not None
    assert specification.loader is not None
    noxfile = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(noxfile)
    warned: list[str] = []

    class Session:
        posargs = ()

        def run(self, program: str, *arguments: str) -> None:
            if "upload" in arguments:
                raise CommandFailed(reason="exit code 1")

        def warn(self, text: str) -> None:
            warned.append(text)

    monkeypatch.setattr(noxfile, "install", lambda session: None)
    noxfile.micro(Session())
    assert warned == ["not in MLflow; later: meshmark upload .benchmarks/latest.json"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"datetime": "yesterday"}'])
def test_what_is_no_session_is_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert cli.main(["upload", str(path)]) == 2
    error = capsys.readouterr().err
    assert "x.json: expected a session of pytest-benchmark, got" in error
    assert error.count("\n") == 1
