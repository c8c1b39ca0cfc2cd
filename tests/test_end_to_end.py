"""The command line from a suite file to MLflow, as a user meets it: own suite, own workload, own implementation."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import cli, tracking

TESTS = Path(__file__).resolve().parent
SUITE = f"""
from harness.case import Case, Measurement, Suite
from harness.layout import Layout

FULL = Measurement(parity_steps=3, warm_up_steps=1, timed_steps=2, rounds=4, communication_steps=2, memory_steps=2)
TIMED = Measurement(parity_steps=3, warm_up_steps=1, timed_steps=2, rounds=4, communication_steps=0, memory_steps=0)
HELD = Measurement(parity_steps=3, timed_steps=0, communication_steps=0, memory_steps=0)


def case(implementation, measurement=TIMED, layout=Layout(data=2), **fields):
    workload = "my_workload.py:sine:width=64"
    return Case(workload=workload, implementation=implementation, measurement=measurement, layout=layout, **fields)


suite = Suite(
    name="mine",
    interleaved=True,
    cases=(
        case("native.floor", role="floor"),
        case("native.ddp", FULL),
        case("torch.ddp", role="peer"),
        case("{TESTS}/impls/mutants.py:NoReduction", HELD),
        case("my_implementation.py:NotHere", HELD),
        case("native.ddp", HELD, Layout(tensor=2)),
    ),
)
"""
IMPLEMENTATION = """
from impls.native.ddp import NativeDataParallel


class NotHere(NativeDataParallel):
    @classmethod
    def unavailable(cls):
        return "my_library is not installed"
"""
FIELDS = {"case", "status", "reason", "environment", "metrics", "parity", "samples"}
CASE_FIELDS = {"id", "implementation", "layout", "workload", "precision", "options"}
PARITY_FIELDS = {
    "ok", "lane", "loss_max_relative", "gradient_norm_max_relative", "gradient_max_relative", "parameter_max_relative",
    "worst_parameter", "first_bad_step", "explanation",
}  # fmt: skip
RATIO_FIELDS = {"strategy", "world_size", "implementation", "best_peer", "ratio", "floor_ratio", "rounds", "spread"}


def meshmark(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process and a directory of its own, with MLflow's store where a newcomer gets it."""
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-m", "harness", *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]


def implementation_of(line: dict[str, Any]) -> str:
    return str(line["case"]["implementation"].rpartition("/")[2])


class Run:
    """One run of the suite above, shared by the tests below."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.results = directory / "out"
        self.store = f"sqlite:///{directory}/mlflow.db"
        (directory / "my_workload.py").write_text((TESTS / "examples/my_workload.py").read_text())
        (directory / "my_implementation.py").write_text(IMPLEMENTATION)
        (directory / "mine.py").write_text(SUITE)
        self.answer = meshmark(directory, "run", "mine.py", "--results", "out")
        assert (self.results / "results.jsonl").exists(), self.answer.stderr
        self.lines = lines_of(self.results)

    def line(self, implementation: str, status: str) -> dict[str, Any]:
        (found,) = (
            line for line in self.lines if implementation_of(line) == implementation and line["status"] == status
        )
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("user"))


def test_each_case_gets_the_status_it_deserves_and_one_bad_case_fails_the_run(run: Run) -> None:
    assert run.answer.returncode == 1, run.answer.stderr
    assert [(implementation_of(line), line["status"], line["reason"] is None) for line in run.lines] == [
        ("native.floor", "ok", True),
        ("native.ddp", "ok", True),
        ("torch.ddp", "ok", True),
        ("mutants.py:NoReduction", "parity failed", False),
        ("my_implementation.py:NotHere", "unavailable", False),
        ("native.ddp", "unsupported", False),
    ]
    assert run.line("my_implementation.py:NotHere", "unavailable")["reason"] == "my_library is not installed"


def test_every_line_of_the_results_holds_what_readers_count_on(run: Run) -> None:
    for line in run.lines:
        assert line.keys() >= FIELDS
        assert line["case"].keys() >= CASE_FIELDS
        assert all(isinstance(value, float | int) for value in line["metrics"].values())
    ours = run.line("native.ddp", "ok")
    assert ours["parity"].keys() >= PARITY_FIELDS
    assert (ours["parity"]["ok"], ours["parity"]["lane"]) == (True, "fp32")
    assert [len(rank) for rank in ours["samples"]["step_seconds"]] == [8, 8], "two steps in each of four rounds"
    assert len(ours["samples"]["losses"]) == 3
    assert ours["environment"]["threads_per_rank"] == 1
    assert ours["environment"]["canary"]["seconds"] > 0
    assert ours["environment"]["malloc"]["MALLOC_MMAP_THRESHOLD_"] is not None
    gradient_bytes = 4 * (64 + 64 + 64 + 1)
    assert ours["metrics"]["communication.bytes_per_step"] == gradient_bytes, "2(n-1)/n of the gradients at n = 2"


def test_a_broken_reduction_is_explained_where_people_look(run: Run) -> None:
    explanation = run.line("mutants.py:NoReduction", "parity failed")["parity"]["explanation"]
    assert "reduc" in explanation
    for text in (run.answer.stdout, (run.results / "report.md").read_text()):
        assert " ".join(explanation.split()) in " ".join(text.split())


def test_the_report_is_the_same_each_time(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    # The lines under "Where to look" name the directory as it was typed.
    assert cli.main(["report", str(run.results), "--format", "markdown"]) == 0
    again, first = capsys.readouterr().out, (run.results / "report.md").read_text()
    assert again.partition("## Where")[0] == first.partition("## Where")[0]
    assert "| native.floor (floor) | data=2 |" in first
    assert cli.main(["report", str(run.results), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == run.lines


def test_ratios_are_of_the_medians_in_the_results(run: Run) -> None:
    rows = {row["implementation"]: row for row in json.loads((run.results / "ratios.json").read_text())}
    assert rows.keys() == {"native.ddp", "torch.ddp"}
    step, row = (
        {
            name: run.line(name, "ok")["metrics"]["step.median_seconds"]
            for name in ("native.floor", "native.ddp", "torch.ddp")
        },
        rows["native.ddp"],
    )
    assert row.keys() >= RATIO_FIELDS
    assert (row["strategy"], row["world_size"], row["best_peer"], row["rounds"]) == ("data_parallel", 2, "torch.ddp", 4)
    assert row["ratio"] == pytest.approx(step["native.ddp"] / step["torch.ddp"], rel=1e-9)
    assert row["floor_ratio"] == pytest.approx(step["native.ddp"] / step["native.floor"], rel=1e-9)
    assert row["spread"] >= 0
    assert "ratios: data_parallel, my_workload.py:sine:width=64, fp32" in run.answer.stdout


def test_mlflow_holds_the_figures_of_the_results_file(run: Run) -> None:
    runs = {found["tags.meshmark.case_id"]: found for found in cases_in(run.store)}
    assert runs.keys() == {line["case"]["id"] for line in run.lines}
    for line in run.lines:
        found = runs[line["case"]["id"]]
        metrics = {name: found.get(f"metrics.{name}") for name in line["metrics"]}
        assert metrics == line["metrics"]
        assert found.get("metrics.canary.seconds") == line["environment"].get("canary", {}).get("seconds")
        assert found["tags.status"] == line["status"]
        if line["parity"]:
            assert found["metrics.parity.loss_max_relative"] == line["parity"]["loss_max_relative"]
    (suite,) = tracking.read_runs("meshmark/suites", tracking_uri=run.store)
    ratios = {row["implementation"]: row for row in json.loads((run.results / "ratios.json").read_text())}
    key = "metrics.ratio/data_parallel native.ddp world 2 my_workload.py:sine:width 64"
    assert suite[key] == ratios["native.ddp"]["ratio"]


def test_uploading_again_changes_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = tracking.read_runs(tracking_uri=run.store)
    for _ in range(2):
        assert cli.main(["upload", str(run.results), "--tracking-uri", run.store]) == 0
        assert "0 runs uploaded, 7 already there" in capsys.readouterr().out
    assert tracking.read_runs(tracking_uri=run.store) == before


def test_resume_runs_what_is_missing_and_leaves_the_rest(run: Run, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    for path in run.directory.glob("*.py"):
        (again / path.name).write_text(path.read_text())
    kept = [line for line in lines_with_text(run.results) if implementation_of(line[0]) != "torch.ddp"]
    (again / "out").mkdir()
    (again / "out" / "suite.json").write_text((run.results / "suite.json").read_text())
    (again / "out" / "results.jsonl").write_text("".join(text for _, text in kept) + '{"torn')
    answer = meshmark(
        again, "run", "mine.py", "--results", "out", "--resume", "--only", "torch.ddp", "--json", "--no-upload"
    )
    assert answer.returncode == 0, answer.stderr
    assert not (again / "mlflow.db").exists()
    shown = json.loads(answer.stdout)
    assert (implementation_of(shown[0]), shown[0]["status"]) == ("torch.ddp", "ok")
    assert shown[1:] == [line for line, _ in kept]
    assert {line["suite_run"] for line in shown} == {run.lines[0]["suite_run"]}


def lines_with_text(directory: Path) -> Sequence[tuple[dict[str, Any], str]]:
    texts = (directory / "results.jsonl").read_text().splitlines(keepends=True)
    return [(json.loads(text), text) for text in texts]


def cases_in(store: str) -> list[dict[str, Any]]:
    found = tracking.read_runs("meshmark/my_workload.sine", tracking_uri=store)
    assert len(found) == 6
    return found


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from harness.case import Case\nsuite = Case(workload='gpt', data=2)\n")
    answer = meshmark(tmp_path, "run", "mine.py")
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1)
    assert answer.stderr.startswith("meshmark: mine.py, line 2: ")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".pyc"] != []
