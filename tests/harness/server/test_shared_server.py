"""A team's server: PostgreSQL behind MLflow with users, and everything that goes through it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import cli, tracking
from harness.run_record import SUITES_EXPERIMENT
from tests.harness.server.servers import Server, mlflow_server, postgres, postgres_commands

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(600),
    pytest.mark.skipif(postgres_commands() is None, reason="PostgreSQL is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("psycopg2") is None, reason="psycopg2 is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("flask_wtf") is None, reason="mlflow[auth] is not installed"),
]

ROOT = Path(__file__).resolve().parents[3]
NAME, PASSWORD = "nightly", "a long password"
SUITE = """
from harness.case import Case, Measurement, Suite
from harness.layout import Layout

suite = Suite(
    name="shared",
    cases=tuple(
        Case(
            workload="gpt:size=tiny",
            implementation="native.ddp",
            layout=Layout(data=2),
            precision=precision,
            measurement=Measurement(timed_steps=200, warm_up_steps=2, communication_steps=1, memory_steps=1),
        )
        for precision in ("fp32", "fp64")
    ),
)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    with postgres(directory / "postgres.log") as database, mlflow_server(directory / "mlflow", database) as started:
        started.add_user(NAME, PASSWORD)
        yield started


@pytest.fixture(autouse=True)
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Path:
    """What a member of the team sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", NAME)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    Path("shared.py").write_text(SUITE)
    return tmp_path


def test_run_check_and_accept_through_the_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    before = server.requests()
    assert cli.main(["run", "shared.py", "--results", "first"]) == 0
    assert f"MLflow at {server.uri}: 3 runs uploaded, 0 already there" in capsys.readouterr().out
    asked = server.requests() - before
    assert asked["runs/log-batch"] == 3, "one for each case, one for the suite run"
    assert asked["runs/log-metric"] == asked["runs/log-parameter"] == 0
    assert sum(asked.values()) < 60, f"none for each of 400 timed steps: {asked}"

    before = server.requests()
    assert cli.main(["upload", "first"]) == 0
    assert "0 runs uploaded, 3 already there" in capsys.readouterr().out
    assert (server.requests() - before)["runs/log-batch"] == 0

    assert cli.main(["check", "--format", "json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert [case["verdict"] for case in checked["cases"]] == ["insufficient data", "insufficient data"]
    assert cli.main(["accept"]) == 0
    assert "communication.bytes_per_step - -> " in capsys.readouterr().out
    runs = tracking.read_runs("meshmark/gpt")
    assert {run["tags.verdict"] for run in runs} == {"insufficient data"}
    assert all("tags.accepted" in run for run in runs)

    assert cli.main(["run", "shared.py", "--results", "second"]) == 0
    assert cli.main(["check"]) == 0
    accepted = Path("accepted/shared.txt")
    accepted.write_text(accepted.read_text().replace("communication.bytes_per_step ", "communication.bytes_per_step 1"))
    capsys.readouterr()
    assert cli.main(["check"]) == 0, "fewer bytes than accepted are no regression"
    assert "improved" in capsys.readouterr().out
    assert len(tracking.read_runs(SUITES_EXPERIMENT)) == 2


@pytest.mark.parametrize(("name", "password"), [("nobody", "nothing"), (NAME, "a wrong one")])
def test_who_is_not_let_in_loses_nothing(
    name: str, password: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], client: Path
) -> None:
    from tests.harness.regression.test_gate import results_of

    directory = results_of(1)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", name)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    assert cli.main(["upload", str(directory)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "2 failed" in line
    assert "401" in line or "not authenticated" in line.lower()
    assert password not in line
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_two_machines_that_upload_at_once(server: Server, client: Path) -> None:
    """Each from a directory of its own: no lock is shared, and none is needed."""
    from tests.harness.regression.test_gate import results_of

    directories = [results_of(night) for night in (10, 11)]
    commands = [[sys.executable, "-m", "harness", "upload", str(directory)] for directory in directories]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    uploads = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands]
    told = [upload.communicate(timeout=120)[0] for upload in uploads]
    assert [upload.returncode for upload in uploads] == [0, 0], told
    stored = Counter(run["tags.meshmark.suite_run"] for run in tracking.read_runs("meshmark/gpt", suite="smoke"))
    assert stored == Counter({"smoke-10": 1, "smoke-11": 1})
