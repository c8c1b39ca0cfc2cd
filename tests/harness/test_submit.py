"""A suite as a Slurm job: the script without Slurm, the rest with a real one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import batch_run, cli, submit
from harness.case import Case, Suite
from harness.engines import Torchrun
from harness.layout import Layout
from harness.result import Result, append, read
from harness.submit import Job, State, limit_seconds, script
from tests.harness.slurm_cluster import slurm  # noqa: F401  a fixture

ROOT = Path(__file__).resolve().parents[2]
SUITE = """
from harness.case import Case, Measurement, Suite
from harness.layout import Layout

QUICK = Measurement(parity_steps=3, warm_up_steps=1, timed_steps=2, communication_steps=0, memory_steps=0)
suite = Suite(
    name="two",
    cases=tuple(
        Case(workload="gpt:size=tiny", implementation="native.ddp", layout=Layout(data=size), measurement=QUICK)
        for size in (2, 4)
    ),
)
"""


def job(directory: Path, **fields: object) -> Job:
    values: dict[str, object] = {
        "name": "meshmark-two",
        "num_nodes": 2,
        "ranks_per_node": 8,
        "command": ["run", "two", "--results", "a b"],
        "directory": directory,
        "limit_seconds": 601.0,
    }
    return Job(**(values | fields))  # type: ignore[arg-type]


def test_the_script_asks_for_what_the_job_needs() -> None:
    text = script(
        job(Path("/shared/r"), partition="gpu", extra=("--gres=gpu:8",)),
        python="/v/python", checkout=Path("/c"), where=Path("/home/me"),
    )  # fmt: skip
    assert text.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=meshmark-two",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "#SBATCH --time=11",
        "#SBATCH --output=/shared/r/job.out",
        "#SBATCH --partition=gpu",
        "#SBATCH --gres=gpu:8",
        "set -euo pipefail",
        "cd /home/me",
        'export PYTHONPATH=/c"${PYTHONPATH:+:$PYTHONPATH}"',
        "exec /v/python -m harness run two --results 'a b'",
    ]


def test_names_with_spaces_and_signs_reach_slurm_whole() -> None:
    text = script(job(Path("/shared/it's 100 %j"), name="my suite"), checkout=Path("/a b"), where=Path("/c d"))
    assert shlex.split(text, comments=False)[1:3] == ["#SBATCH", "--job-name=my suite"]
    assert "--output=/shared/it's 100 %%j/job.out" in shlex.split(text)
    assert "\ncd '/c d'\nexport PYTHONPATH='/a b'" in text


def test_the_limit_is_what_the_deadlines_add_up_to() -> None:
    cases = tuple(
        Case(workload="gpt", implementation="native.ddp", layout=Layout(data=n), deadline_seconds=100.0 * n)
        for n in (1, 2)
    )
    assert limit_seconds(Suite(name="s", cases=cases)) == 2 * (100 + 200) + 300


@pytest.mark.parametrize(
    ("text", "code"), [("0:0", 0), ("1:0", 1), ("0:9", 137), ("130:0", 130), ("", None), ("nonsense", None)]
)
def test_slurm_s_exit_codes(text: str, code: int | None) -> None:
    assert submit._exit_code(text) == code


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nodes", "0", "--ranks-per-node", "2"], "--nodes must be at least 1, got 0"),
        (["--nodes", "1", "--ranks-per-node", "0"], "--ranks-per-node must be at least 1, got 0"),
        (["--nodes", "1", "--ranks-per-node", "1", "--minutes", "0"], "--minutes must be at least 1, got 0"),
        (
            ["--nodes", "1", "--ranks-per-node", "1", "--sbatch", "gres=gpu:8"],
            "--sbatch: expected an option such as --gres=gpu:8, got 'gres=gpu:8'",
        ),
        (
            ["--nodes", "1", "--ranks-per-node", "1", "--image", "i"],
            "--engine slurm: expected none of the other engine's options, got --image",
        ),
    ],
)
def test_bad_numbers_are_refused_in_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["submit", "smoke", *arguments, "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"meshmark: {line}\n"


def test_without_slurm_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    given = ["submit", "smoke", "--nodes", "1", "--ranks-per-node", "2", "--results", str(tmp_path / "r")]
    assert cli.main(given) == 2
    assert capsys.readouterr().err == "meshmark: sbatch: expected Slurm's commands on this machine, found none\n"


def test_a_dry_run_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "r"
    given = ["submit", "smoke", "--nodes", "2", "--ranks-per-node", "2", "--dry-run", "--results", str(where)]
    assert cli.main(given) == 0
    assert f"--engine srun --ranks-per-node 2 --results {where} --no-upload" in capsys.readouterr().out
    assert not where.exists()


def meshmark(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("slurm")
def test_a_suite_runs_on_two_nodes_and_its_records_come_back(tmp_path: Path) -> None:
    here = tmp_path / "my work"
    here.mkdir()
    (here / "two sizes.py").write_text(SUITE)
    results_in = here / "it's 100 %j"
    done = meshmark(
        *("submit", "two sizes.py", "--nodes", "2", "--ranks-per-node", "2"),
        *("--results", results_in.name, "--minutes", "5"),
        directory=here,
    )
    output = results_in / submit.OUTPUT_FILE
    assert done.returncode == 0, done.stdout + done.stderr + (output.read_text() if output.exists() else "")
    assert "RUNNING" in done.stdout
    assert "native.ddp data=4: ok" in done.stdout
    results = [json.loads(line) for line in (results_in / "results.jsonl").read_text().splitlines()]
    topologies = {result["case"]["layout"]: result["case"]["topology"] for result in results}
    assert {name: (t["num_nodes"], t["ranks_per_node"]) for name, t in topologies.items()} == {
        "data=2": (1, 2),
        "data=4": (2, 2),
    }
    assert all(result["parity"]["ok"] for result in results)
    assert (here / "mlflow.db").exists()


@pytest.mark.cluster
@pytest.mark.usefixtures("slurm")
def test_a_job_that_never_ends_is_cancelled_by_our_own_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "_GRACE_SECONDS", 1.0)
    endless = job(tmp_path, limit_seconds=2.0)
    path = tmp_path / submit.SCRIPT_FILE
    path.write_text("#!/bin/bash\n#SBATCH --time=10\n#SBATCH --output=/dev/null\nsleep 300\n")
    number = submit._run(["sbatch", "--parsable", str(path)]).strip()
    states: list[str] = []
    ended = submit.follow(endless, number, lambda state: states.append(state.name), lambda _result: None)
    assert ended == State(name="DEADLINE", reason="RUNNING for more than its limit of 2 s")
    assert states[-1] == "RUNNING"
    until = time.monotonic() + 20
    while not submit.state(number).has_ended:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert submit.state(number).name == "CANCELLED"


@pytest.mark.cluster
@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(("wait_seconds", "limit"), [(None, 3), (2.0, 2)])
def test_a_job_whose_nodes_never_come_up_is_cancelled_by_our_own_deadline(
    wait_seconds: float | None, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "_NODES_DOWN_SECONDS", 3.0)
    monkeypatch.setattr(submit, "_POLL_SECONDS", 0.5)
    path = tmp_path / submit.SCRIPT_FILE
    path.write_text("#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --output=/dev/null\nsleep 300\n")
    # A node that is DOWN comes back by itself here (ReturnToService).
    submit._run(["scontrol", "update", "NodeName=n0,n1", "State=DRAIN", "Reason=test"])
    try:
        number = submit._run(["sbatch", "--parsable", str(path)]).strip()
        waiting = job(tmp_path, wait_seconds=wait_seconds)
        ended = submit.follow(waiting, number, lambda _state: None, lambda _result: None)
    finally:
        submit._run(["scontrol", "update", "NodeName=n0,n1", "State=RESUME"])
    assert ended.name == "DEADLINE"
    assert re.fullmatch(
        rf"PENDING for more than {limit} s, (Nodes_required_for_job_are_DOWN|ReqNodeNotAvail)\S*; "
        r"--wait-minutes is how long it may wait",
        ended.reason,
    )
    until = time.monotonic() + 20
    while not submit.state(number).has_ended:
        assert time.monotonic() < until
        time.sleep(0.2)


@pytest.mark.cluster
@pytest.mark.usefixtures("slurm")
def test_a_job_that_can_never_start_is_cancelled_with_slurm_s_reason(tmp_path: Path) -> None:
    done = meshmark(
        *("submit", "smoke", "--nodes", "5", "--ranks-per-node", "2", "--results", str(tmp_path / "r")),
        directory=tmp_path,
    )
    assert done.returncode == 1, done.stdout
    assert "ended as CANCELLED (PartitionConfig: it can never start) without a result" in done.stderr


@pytest.mark.parametrize(("size", "where"), [(1, "1x1"), (2, "1x2"), (3, "3x1"), (4, "2x2"), (6, "3x2")])
def test_a_case_takes_the_fewest_nodes_that_share_its_ranks_evenly(size: int, where: str) -> None:
    case = Case(workload="gpt", implementation="native.ddp", layout=Layout(data=size))
    assert str(Torchrun(2, within_slurm=False).placed(case).placed) == where


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, "--engine srun: expected to run within a Slurm allocation, found none; see `meshmark submit`"),
        (
            {"SLURM_JOB_NUM_NODES": "2"},
            "--engine srun: expected to run on the allocation's first node, found it outside; try sbatch",
        ),
    ],
)
def test_outside_an_allocation_or_its_nodes_one_line_says_so(
    variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLURM_JOB_NUM_NODES", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "smoke", "--engine", "srun", "--ranks-per-node", "2"]) == 2
    assert capsys.readouterr().err == f"meshmark: {line}\n"


@pytest.mark.parametrize(("silence_seconds", "name"), [(60.0, "COMPLETED"), (0.0, "GONE")])
def test_a_controller_that_is_silent_for_a_while_loses_no_job(
    silence_seconds: float, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([State(name="RUNNING"), ValueError("scontrol: no route"), State(name="COMPLETED", exit_code=0)])

    def answer(_number: str) -> State:
        found = next(answers)
        if isinstance(found, ValueError):
            raise found
        return found

    monkeypatch.setattr(submit, "state", answer)
    monkeypatch.setattr(submit, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(submit, "_SILENCE_SECONDS", silence_seconds)
    states: list[str] = []
    ended = submit.follow(job(tmp_path), "7", lambda state: states.append(state.name), lambda _result: None)
    assert ended.name == name
    assert states[0] == "RUNNING"


def test_of_a_resumed_job_the_results_that_are_new_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Case(workload="gpt", implementation="native.ddp", layout=Layout(data=2))
    append(tmp_path, Result(case=failed, status="failed", suite="s", suite_run="s-1", started=1.0))

    def answer(_number: str) -> State:
        if len(read(tmp_path)) == 1 and read(tmp_path)[0].status == "ok":
            return State(name="COMPLETED", exit_code=0)
        append(tmp_path, Result(case=failed, status="ok", suite="s", suite_run="s-1", started=2.0))
        return State(name="RUNNING")

    monkeypatch.setattr(submit, "state", answer)
    monkeypatch.setattr(submit, "_POLL_SECONDS", 0.01)
    told: list[Result] = []
    submit.follow(job(tmp_path), "7", lambda _state: None, told.append)
    assert [(result.status, result.started) for result in told] == [("ok", 2.0)]


def test_a_job_that_cannot_be_cancelled_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm's commands are gone when the user gives up."""

    def interrupted(*_arguments: object) -> State:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "submit", lambda _job: "7")
    monkeypatch.setattr(submit, "follow", interrupted)
    monkeypatch.setenv("PATH", str(tmp_path))
    suite = Suite(name="s", cases=(Case(workload="gpt", implementation="native.ddp", layout=Layout(data=2)),))
    again = ["meshmark", "submit", "my suite.py", "--resume"]
    assert batch_run.execute(suite, job(tmp_path), as_json=False, upload=False, again=again) == 130
    told = capsys.readouterr().err
    assert "job 7 could not be cancelled (scancel: expected Slurm's commands on this machine, found none)" in told
    assert told.endswith("to go on: meshmark submit 'my suite.py' --resume\n")
