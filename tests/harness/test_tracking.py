"""Tracking against real stores: what is uploaded reads back the same, once, whatever happened on the way."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import tracking
from harness.case import Case
from harness.layout import Layout
from harness.result import RESULTS_FILE, Parity, Result, append
from harness.tracking import read_runs, store_uri, upload

PARITY = Parity(
    ok=True,
    lane="fp32",
    loss_max_relative=1 / 3,
    gradient_norm_max_relative=1e-300,
    gradient_max_relative=0.1,
    parameter_max_relative=0.0,
    worst_parameter=None,
    first_bad_step=None,
    explanation=None,
    replicas_bit_equal=True,
)


def result(implementation="native.ddp", **changes):
    given = {
        "case": Case(workload="gpt:size=17m", implementation=implementation, layout=Layout(data=2)),
        "status": "ok",
        "metrics": {"step.median_seconds": 1 / 3, "memory.peak_allocated_bytes.max_rank": 2**40 + 1},
        "parity": PARITY,
        "samples": {"losses": [3.0, 2.0, 1.0], "reference_losses": [3.0, 2.0, 1.5], "step_seconds": [[0.1], [0.2]]},
        "suite": "smoke",
        "suite_run": "night 1",
        "started": 1_700_000_000.125,
        "duration_seconds": 2.5,
    }
    return Result(**{**given, **changes})


@pytest.fixture
def store(empty_store, tmp_path):
    """The URI of a fresh store."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def directory(tmp_path):
    """A results directory with two cases."""
    path = tmp_path / "results"
    path.mkdir()
    append(path, result())
    append(path, result("torch.ddp"))
    return path


def counts(report):
    return report.uploaded, report.already_there, report.failed


def ask(uri, method, *arguments):
    """What MLflow's own client answers."""
    with tracking._client(uri) as client:
        return getattr(client, method)(*arguments)


def test_values_read_back_as_they_stand_in_the_results_file(store, directory):
    report = upload(directory, tracking_uri=store)
    assert counts(report) == (3, 0, 0)
    assert report.experiments == ("meshmark/gpt", "meshmark/suites")
    runs = {run["tags.implementation"]: run for run in read_runs("meshmark/gpt", tracking_uri=store)}
    for line in (directory / RESULTS_FILE).read_text().splitlines():
        data = json.loads(line)
        run = runs.pop(data["case"]["implementation"])
        assert {name: run[f"metrics.{name}"] for name in data["metrics"]} == data["metrics"]
        assert run["metrics.parity.loss_max_relative"] == data["parity"]["loss_max_relative"]
        assert run["metrics.parity.gradient_norm_max_relative"] == 1e-300
        assert run["params.workload"] == "gpt:size=17m"
        assert run["tags.meshmark.case_id"] == data["case"]["id"]
        assert run["tags.meshmark.suite_run"] == "night 1"
        assert (run["started"], run["ended"]) == (1_700_000_000.125, 1_700_000_002.625)
        history = ask(store, "get_metric_history", run["run_id"], "loss.difference")
        assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.0), (2, -0.5)]
        assert run["metrics.step.seconds"] == 0.2
        (artifact,) = Path(directory.parent, "mlartifacts", "meshmark", "gpt", run["run_id"]).rglob("result.json")
        assert artifact.read_text() == line
    assert not runs
    (suite,) = read_runs("meshmark/suites", tracking_uri=store)
    assert suite["metrics.cases.ok"] == 2


def test_a_second_upload_changes_nothing(store, directory):
    upload(directory, tracking_uri=store)
    before = read_runs(tracking_uri=store)
    assert counts(upload(directory, tracking_uri=store)) == (0, 3, 0)
    assert read_runs(tracking_uri=store) == before


def test_a_case_that_was_run_again_is_replaced(store, directory):
    append(directory, result("torch.fsdp", status="failed", reason="rank 1 died"))
    upload(directory, tracking_uri=store)
    append(directory, result("torch.fsdp", started=1_700_000_100.0))
    assert counts(upload(directory, tracking_uri=store)) == (2, 2, 0)  # the case, and the suite run that counts it
    runs = read_runs("meshmark/gpt", tracking_uri=store)
    assert sorted((run["tags.implementation"], run["tags.status"]) for run in runs) == [
        ("native.ddp", "ok"),
        ("torch.ddp", "ok"),
        ("torch.fsdp", "ok"),
    ]


@pytest.mark.parametrize("method", ["create_run", "log_batch", "log_text", "set_terminated", "set_tag"])
def test_an_upload_that_died_is_finished_by_the_next(store, directory, monkeypatch, method):
    from mlflow import MlflowClient

    original, calls = getattr(MlflowClient, method), []

    def dies_in_the_second_run(*arguments, **options):
        calls.append(method)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, method, dies_in_the_second_run)
        with pytest.raises(KeyboardInterrupt):
            upload(directory, tracking_uri=store)
    assert len(read_runs(tracking_uri=store)) == 1  # a half-written run is not shown
    assert counts(upload(directory, tracking_uri=store)) == (2, 1, 0)
    experiment = ask(store, "get_experiment_by_name", "meshmark/gpt")
    assert len(ask(store, "search_runs", [experiment.experiment_id])) == 2


def test_one_bad_run_does_not_hold_up_the_others(store, directory):
    append(directory, result("torch.fsdp", samples={"losses": "not a list"}))
    append(directory, result("torch.zero", metrics={"bad,name": 1.0}))
    append(directory, result("torch.pipeline"))
    report = upload(directory, tracking_uri=store)
    assert counts(report) == (4, 0, 2)
    assert "2 failed: ValueError: could not convert string to float" in report.message
    assert "\n" not in report.message
    assert {run["tags.implementation"] for run in read_runs("meshmark/gpt", tracking_uri=store)} == {
        "native.ddp",
        "torch.ddp",
        "torch.pipeline",
    }


def test_more_than_one_call_can_take(store, tmp_path):
    metrics = {f"metric.{index}": index / 7 for index in range(2500)}
    options = {f"option_{index}": index for index in range(150)}
    case = Case(workload="gpt", implementation="native.ddp", options={**options, "long": "x" * 20_000})
    append(tmp_path, result(case=case, metrics=metrics))
    assert counts(upload(tmp_path, tracking_uri=store)) == (2, 0, 0)
    (run,) = read_runs("meshmark/gpt", tracking_uri=store)
    assert {name: run[f"metrics.{name}"] for name in metrics} == metrics
    assert {name: run[f"params.options.{name}"] for name in options} == {k: str(v) for k, v in options.items()}


def test_status_is_true_to_fact(store, directory):
    append(directory, result("torch.fsdp", status="unavailable", reason="no GPU"))
    append(directory, result("torch.zero", status="timed out", reason="rank 0 hung"))
    upload(directory, tracking_uri=store)
    statuses = {run["tags.implementation"]: run["status"] for run in read_runs("meshmark/gpt", tracking_uri=store)}
    assert statuses == {
        "native.ddp": "FINISHED",
        "torch.ddp": "FINISHED",
        "torch.fsdp": "FINISHED",
        "torch.zero": "FAILED",
    }
    assert read_runs("meshmark/suites", tracking_uri=store)[0]["status"] == "FAILED"


def test_a_quotation_mark_in_a_name_is_found_again(store, tmp_path):
    append(tmp_path, result(suite_run="Ann's night"))
    assert counts(upload(tmp_path, tracking_uri=store)) == (2, 0, 0)
    assert counts(upload(tmp_path, tracking_uri=store)) == (0, 2, 0)


def test_an_unreachable_server_costs_a_line(directory, monkeypatch, capfd):
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    before = (directory / RESULTS_FILE).read_bytes()
    start = time.monotonic()
    report = upload(directory, tracking_uri="http://user:secret@127.0.0.1:1")
    assert time.monotonic() - start < 15
    assert counts(report) == (0, 0, 3)
    assert "Connection refused" in report.message
    assert f"meshmark upload {directory}" in report.message
    assert "secret" not in report.message
    assert "\n" not in report.message
    assert capfd.readouterr() == ("", "")
    assert (directory / RESULTS_FILE).read_bytes() == before
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_a_slow_store_is_given_up_in_time_and_the_rest_comes_later(store, directory):
    report = upload(directory, tracking_uri=store, within_seconds=0.0)
    assert counts(report) == (0, 0, 3)
    assert "the store is slow, and took more than 0 s. Nothing is lost" in report.message
    assert counts(upload(directory, tracking_uri=store)) == (3, 0, 0)


def test_a_broken_store_costs_a_line(directory, tmp_path):
    (tmp_path / "mlflow.db").write_text("this is no database, and long enough to be seen as none" * 20)
    for uri in (f"sqlite:///{tmp_path}/mlflow.db", f"sqlite:///{tmp_path}/missing/mlflow.db"):
        report = upload(directory, tracking_uri=uri)
        assert counts(report) == (0, 0, 3)
        assert "Nothing is lost" in report.message
    with pytest.raises(ConnectionError, match="cannot be read"):
        read_runs(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")


def test_no_results_is_bad_input(tmp_path):
    with pytest.raises(ValueError, match="expected a results directory"):
        upload(tmp_path)


def test_reading_a_store_that_does_not_exist_creates_none(tmp_path):
    assert read_runs(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db") == []
    assert not list(tmp_path.iterdir())


def test_the_store_is_explicit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert store_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert store_uri() == "http://tracking:5000"
    assert store_uri("sqlite:////data/runs.db?timeout=5") == "sqlite:////data/runs.db?timeout=5"


def test_a_locked_database_is_waited_for(monkeypatch):
    monkeypatch.setattr(tracking, "_LOCKED_WAITS_SECONDS", (0.0, 0.0))
    answers = iter([RuntimeError("(sqlite3.OperationalError) database is locked"), "written"])

    def write():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert tracking._patiently(write) == "written"
    monkeypatch.setattr(tracking, "_LOCKED_SECONDS", -1.0)
    answers = iter([RuntimeError("database is locked"), "written"])
    with pytest.raises(RuntimeError, match="is locked"):
        tracking._patiently(write)  # it was waited for long enough
    answers = iter([RuntimeError("disk full"), "written"])
    with pytest.raises(RuntimeError, match="disk full"):
        tracking._patiently(write)


def test_a_writer_that_does_not_let_go_has_a_deadline(store, directory, monkeypatch):
    monkeypatch.setattr(tracking, "_LOCK_DEADLINE_SECONDS", 0.2)
    with tracking._locked(directory.parent / "mlflow.db.lock"):
        report = upload(directory, tracking_uri=store)
    assert counts(report) == (0, 0, 3)
    assert "another upload has held it" in report.message


FOUR_WRITERS = """
import multiprocessing, os, sys
from pathlib import Path
from harness import tracking
assert "mlflow" not in sys.modules, "mlflow must be imported by those who use it only"

def write(barrier, directory):
    barrier.wait(60)
    own = tracking.upload(Path(directory))
    barrier.wait(60)
    shared = tracking.upload(Path("shared"))
    good = (own.uploaded, own.failed, shared.failed) == (2, 0, 0)
    sys.exit(0 if good else f"{own.message}; {shared.message}")

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    import mlflow  # once, before the fork: it takes seconds
    writers = [context.Process(target=write, args=(barrier, directory)) for directory in sys.argv[1:]]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    sys.exit(max(writer.exitcode for writer in writers))
"""


def test_four_writers_on_a_fresh_store(tmp_path):
    for name in ("0", "1", "2", "3", "shared"):
        (tmp_path / name).mkdir()
        append(tmp_path / name, result(suite_run=f"night {name}"))
    for index in range(4):
        append(tmp_path / "shared", result(f"implementation.{index}", suite_run="night shared"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    answer = subprocess.run(
        [sys.executable, "-c", FOUR_WRITERS, *"0123"],
        cwd=tmp_path,
        env={**environment, "MLFLOW_DISABLE_TELEMETRY": "true"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    experiments = sorted(experiment.name for experiment in ask(uri, "search_experiments"))
    assert experiments == ["Default", "meshmark/gpt", "meshmark/suites"]
    for experiment in experiments[1:]:
        nights = [run["tags.meshmark.suite_run"] for run in read_runs(experiment, tracking_uri=uri)]
        num_shared = 5 if experiment == "meshmark/gpt" else 1
        assert sorted(nights) == ["night 0", "night 1", "night 2", "night 3", *["night shared"] * num_shared]
    assert not (tmp_path / "mlruns").exists()


@contextmanager
def mlflow_server(database: Path, log: Path):
    """A tracking server as a team would start it, on a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{database}", "--artifacts-destination", str(log.parent / "served")]
    settings = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        uri, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{uri}/health", timeout=5):
                    break
            except OSError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield uri
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


def test_a_server_shows_the_same_runs_and_takes_new_ones(store, directory, tmp_path):
    upload(directory, tracking_uri=store)
    with mlflow_server(tmp_path / "mlflow.db", tmp_path / "server.log") as uri:
        assert counts(upload(directory, tracking_uri=uri)) == (0, 3, 0)
        shown = read_runs(tracking_uri=uri)
        assert shown == read_runs(tracking_uri=store)

        other = tmp_path / "other"
        other.mkdir()
        append(other, result(case=Case(workload="convnet", implementation="native.ddp"), suite_run="night 2"))
        assert counts(upload(other, tracking_uri=uri)) == (2, 0, 0)
        (run,) = read_runs("meshmark/convnet", tracking_uri=uri)
        earlier = next(run for run in shown if run["experiment"] == "meshmark/gpt")
        for found, path in ((run, other), (earlier, directory)):
            url = f"{uri}/get-artifact?path=result.json&run_id={found['run_id']}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.read().decode() in (path / RESULTS_FILE).read_text().splitlines()
