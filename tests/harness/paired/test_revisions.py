"""Two revisions of this very project, really timed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness import cli, suites
from harness.paired import builds
from harness.paired.side import Side
from tests.harness.paired.projects import ROOT, SUITE, commit, copy_of_project, git, slow_down


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tags: base, same (the same code), slow (15 %), twice (100 %), broken; each from base."""
    made = copy_of_project(tmp_path_factory.mktemp("projects") / "project")
    commit(made, "same")
    slow_down(made, 0.15, "slow")
    git(made, "checkout", "--quiet", "--detach", "base")
    slow_down(made, 1.0, "twice")
    git(made, "checkout", "--quiet", "--detach", "base")
    (made / "impls/native/ddp.py").write_text("raise RuntimeError('broken on purpose')\n")
    commit(made, "broken")
    git(made, "checkout", "--quiet", "--detach", "base")
    return made


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: Path) -> Iterator[Path]:
    """In the project, with results and MLflow's store apart, and a temporary directory that must be empty again."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    yield tmp_path
    assert git(project, "worktree", "list").count("\n") == 0, "a worktree is left"


def suite_file(directory: Path, *implementations: str, timed_steps: int) -> Path:
    path = directory / "ab.py"
    path.write_text(SUITE.format(implementations=implementations, timed_steps=timed_steps))
    return path


@pytest.mark.paired
def test_each_side_runs_its_own_code(project: Path, elsewhere: Path) -> None:
    (case,) = suites.load(str(suite_file(elsewhere, "native.ddp", timed_steps=20))).cases
    with (
        builds.of_revisions(("base", "twice"), project, print) as (first, second),
        Side(first) as base,
        Side(second) as twice,
    ):
        a, b, b_again, a_again = (side.time(case) for side in (base, twice, twice, base))
    assert [timing.reason for timing in (a, b, b_again, a_again)] == [""] * 4
    assert a.seconds is not None
    assert a.steps is not None
    assert [len(steps) for steps in a.steps] == [20, 20]
    fast, slow = (min(t.seconds or 0 for t in pair) for pair in ((a, a_again), (b, b_again)))
    assert slow > 1.4 * fast


@pytest.mark.paired
def test_a_build_that_cannot_train_says_why(project: Path, elsewhere: Path) -> None:
    (case,) = suites.load(str(suite_file(elsewhere, "native.ddp", timed_steps=5))).cases
    with builds.of_revisions(("base", "broken"), project, print) as (_, second), Side(second) as broken:
        timing = broken.time(case)
    assert timing.status == "failed"
    assert timing.reason == "broken: RuntimeError: broken on purpose"


@pytest.mark.paired
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_a_comparison_ends_its_ranks(project: Path, elsewhere: Path, how: signal.Signals) -> None:
    suite = suite_file(elsewhere, "native.ddp", timed_steps=5)
    temporary = elsewhere / "t"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "harness", "compare", "base", "slow", "--suite", str(suite)]
    with subprocess.Popen(
        command, cwd=project, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("2/10"):
                break
        children = descendants(process.pid)
        os.killpg(process.pid, how)
        process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert len(children) >= 2, "both sides were there"
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    if how == signal.SIGKILL:  # nobody was left to clean up; the next comparison does
        (site,) = temporary.glob("meshmark-compare-*")
        shutil.rmtree(site)
        git(project, "worktree", "prune")
    assert list(temporary.iterdir()) == []


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= {int(child), *descendants(int(child))}
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["compare"], "expected results directories, or two revisions, or --peer twice, got 0 names and 0 peers"),
        (["compare", "a", "b", "c"], "got 3 names and 0 peers"),
        (["compare", "base", "--peer", "x==1"], "got 1 names and 1 peers"),
        (["compare", "base", "same"], "expected --suite S, whose cases are timed on both, got none"),
        (["compare", "base", "--suite", "smoke"], "compare base: --suite is for two revisions, got results"),
        (["compare", "base", "same", "--suite", "smoke", "--out", "x.md"], "--out is for the page of results"),
        (["compare", "base", "none", "--suite", "smoke"], "none: expected a revision of"),
        (["compare", "base", "same", "--suite", "none"], "suite 'none': expected one of"),
        (["compare", "--peer", "x", "--peer", "y", "--suite", "smoke"], "expected a library with its version"),
    ],
)
def test_bad_input_is_one_line(
    elsewhere: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.paired
@pytest.mark.timeout(900)
def test_a_slowdown_of_15_percent_is_found_and_nothing_else(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = suite_file(elsewhere, "native.ddp", "torch.ddp", timed_steps=40)
    results = elsewhere / "results"
    arguments = ["compare", "base", "slow", "--suite", str(suite), "--format", "json", "--results", str(results)]
    assert cli.main(arguments) == 1
    found = json.loads(capsys.readouterr().out)
    verdicts = {case["case"]["implementation"]: case for case in found["cases"]}
    assert verdicts["torch.ddp"]["verdict"] == "ok"
    assert verdicts["native.ddp"]["verdict"] == "regressed"
    # On a busy machine a rank that computes longer also waits longer for its turn.
    assert verdicts["native.ddp"]["comparison"]["shift"] > 0.05
    assert found == json.loads((results / "pairs.json").read_text())
    assert found["b"] == {"name": "slow", "commit": git(Path.cwd(), "rev-parse", "slow")}


@pytest.mark.paired
@pytest.mark.timeout(900)
def test_the_same_code_twice_is_quiet(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = suite_file(elsewhere, "native.ddp", "torch.ddp", timed_steps=40)
    assert cli.main(["compare", "base", "same", "--suite", str(suite), "--format", "markdown", "--no-upload"]) == 0
    assert capsys.readouterr().out.startswith("**not red: ab, B same (")


@pytest.mark.paired
@pytest.mark.timeout(900)
def test_the_history_nominates_and_the_pairs_decide(project: Path, elsewhere: Path) -> None:
    """Two cases whose level has moved: one of them through the code, the other with the machine."""
    from harness.regression.accepted_values import Accepted
    from harness.regression.check import check
    from harness.regression.confirmation import confirm
    from tests.harness.regression.nights import nights

    cases = {
        case.id: case
        for case in suites.load(str(suite_file(elsewhere, "native.ddp", "torch.ddp", timed_steps=40))).cases
    }
    base, slow = (git(project, "rev-parse", name) for name in ("base", "slow"))
    runs = [
        replace(run, commit=base if night < 20 else slow)
        for case in cases.values()
        for night, run in enumerate(
            nights([1.0] * 20 + [1.15] * 8, case_id=case.id, name=case.label, implementation=case.implementation)
        )
    ]
    checked = check([run for run in runs if run.suite_run == runs[-1].suite_run], runs, Accepted())
    assert [case.verdict for case in checked.cases] == ["regressed", "regressed"]
    confirmed = confirm(checked, cases, project, machine_of=None, tell=print)
    told = {case.run.implementation: (case.verdict, case.time and case.time.text) for case in confirmed.cases}
    assert told["native.ddp"][0] == "regressed"
    assert "; confirmed: +" in str(told["native.ddp"][1])
    assert told["torch.ddp"][0] == "suspect"
    assert "; not confirmed: " in str(told["torch.ddp"][1])
