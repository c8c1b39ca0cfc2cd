"""The gate as a person meets it, on a real store: run, check, accept, and one byte too many."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cli, suites, tracking
from harness.case import Case
from harness.layout import Layout
from harness.regression import gate
from harness.regression.history import from_results, from_store
from harness.result import Result, append, read
from harness.run_record import case_record

NIGHT = 1_735_689_600.0
BYTES = "communication.bytes_per_step"
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


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_store: Path) -> None:
    """A directory with an empty store, where a newcomer has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")


def results_of(night: int, **changes: Any) -> Path:
    """A results directory with one case."""
    directory = Path(f"night-{night}")
    directory.mkdir()
    given = {
        "case": Case(workload="gpt", implementation="native.ddp", layout=Layout(data=2), precision="fp64"),
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


def test_a_run_is_the_same_from_the_store_and_from_its_directory() -> None:
    directory = uploaded(1)
    (stored,) = from_store(tracking.read_runs(suite="smoke"))
    (found,) = from_results(read(directory), directory)
    assert stored.run_id
    assert replace(stored, run_id="") == found
    assert found.relative_seconds == pytest.approx(10.0)
    assert (found.machine, found.environment, found.commit, found.device) == ("m1", "e1", "c0ffee", "cpu")
    assert found.dirty
    assert found.versions == {"deepspeed": "0.19.8", "torch": "2.13.0", "threads_per_rank": "1"}
    assert found.metrics["loss"] == 2.5
    assert from_store(tracking.read_runs(suite="peers")) == []


def test_from_the_first_night_to_an_accepted_change(capsys: pytest.CaptureFixture[str]) -> None:
    first = uploaded(1)
    assert cli.main(["check"]) == 0, "nothing is nominated"
    shown = capsys.readouterr().out
    assert "insufficient data" in shown
    assert "1 with exact figures that nothing is held against yet" in shown

    assert cli.main(["accept"]) == 0
    assert f"native.ddp data=2: {BYTES} - -> 1,000" in capsys.readouterr().out
    (_, *lines) = Path("accepted/smoke.txt").read_text().splitlines()
    assert [line.split()[1:] for line in lines] == [["cpu", BYTES, "1000"], ["cpu", "loss", "2.5"]]
    assert "tags.accepted" in case_tags()["smoke-1"]

    uploaded(2, metrics={"step.median_seconds": 0.1, BYTES: 1001.0})
    assert cli.main(["check", "--format", "json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["suite_run"], data["red"], data["cases"][0]["verdict"]) == ("smoke-2", True, "regressed")
    assert case_tags()["smoke-2"]["tags.verdict"] == "regressed"
    assert cli.main(["check", "--suite-run", "smoke-1", "--no-upload"]) == 0
    assert case_tags()["smoke-1"]["tags.verdict"] == "insufficient data"
    tracking.upload(first)
    assert case_tags()["smoke-1"]["tags.verdict"] == "insufficient data", "an upload of the same leaves it"

    assert cli.main(["accept", "--only", "native.ddp"]) == 0
    assert cli.main(["accept"]) == 0
    assert "nothing to accept" in capsys.readouterr().out
    assert cli.main(["check"]) == 0
    capsys.readouterr()

    diverged = results_of(3, status="parity failed", reason="gradients are not reduced")
    assert cli.main(["check", "--results", str(diverged), "--format", "markdown"]) == 1
    page = capsys.readouterr().out
    assert page.startswith("**RED: smoke-3: 1 parity failed**")
    assert "gradients are not reduced" in page


def test_a_night_that_is_dated_ahead_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten years: the clock of a new machine, once."""
    ahead = NIGHT + 10 * 365 * 86_400
    uploaded(1)
    uploaded(9, started=ahead)
    uploaded(2)
    assert cli.main(["check", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["suite_run"] == "smoke-2"
    (note,) = (note for note in data["notes"] if "ahead" in note)
    assert "passed over: smoke-9 (2034-12-30 00:00 UTC); --suite-run" in note

    assert cli.main(["check", "--suite-run", "smoke-9"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "smoke-9 is dated 2034-12-30 00:00 UTC, ahead of this machine's clock" in shown
    assert cli.main(["check", "--suite-run", "smoke-1"]) == 0
    assert "ahead" not in capsys.readouterr().out, "nothing was passed over"

    only_ahead = results_of(10, started=ahead)
    assert cli.main(["check", "--results", str(only_ahead)]) == 0
    assert "smoke-10 is dated" in " ".join(capsys.readouterr().out.split())


def test_what_looks_slower_is_timed_in_turns_unless_it_cannot_be_or_must_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = results_of(0)
    (one,) = read(directory)
    nights = [
        replace(
            one,
            suite_run=f"smoke-{night:02}",
            started=NIGHT + night,
            environment={**ENVIRONMENT, "commit": f"{night:040x}", "dirty": False},
            metrics={
                **one.metrics,
                "step.median_seconds": 0.1 * (1 + night % 3 / 1000) * (1.5 if night >= 20 else 1.0),
            },
        )
        for night in range(26)
    ]
    append(directory, nights[-1])
    assert tracking.send([case_record(night, directory) for night in nights], kept=directory).failed == 0
    asked = ["check", "--results", str(directory), "--format", "markdown", "--no-upload"]
    assert cli.main(asked) == 1
    page = capsys.readouterr().out
    assert page.startswith("**RED: smoke-25: 1 regressed (by history)**")
    assert re.search(r"- 1 not timed in turns: this machine is [0-9a-f]{12}, the history is that of m1\n", page)
    assert cli.main([*asked, "--confirm"]) == 1
    assert "- 1 not timed in turns: " in (page := capsys.readouterr().out)
    assert "expected a git checkout to take revisions from, found none" in page, "whatever machine this is"
    assert cli.main([*asked, "--no-confirm"]) == 1
    page = capsys.readouterr().out
    assert "1 regressed (by history)" in page
    assert "in turns" not in page


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["check"], "mlflow.db: expected at least one suite run, found none; `meshmark run` makes one"),
        (["check", "--results", "nowhere"], "nowhere: expected a results directory with results.jsonl, found none"),
        (["accept", "--results", "night-1", "--only", "x"], "--only x: expected part of one of 1 cases' names"),
        (
            ["check", "--results", "night-1", "--suite-run", "smoke-9"],
            "--suite-run smoke-9: expected one of night-1, the latest of which are smoke-1",
        ),
        (["check", "--results", "night-1", "--accepted", "broken"], "broken/smoke.txt, line 1: expected `case device"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    results_of(1)
    Path("broken").mkdir()
    Path("broken/smoke.txt").write_text("nonsense\n")
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1


def test_what_can_run_again_is_what_the_directory_or_the_suite_of_that_name_holds() -> None:
    directory = results_of(1)
    checked = gate.judged(suite_run=None, results=directory, accepted_directory=Path("accepted"))
    (case,) = read(directory)
    assert gate.cases_at_hand(checked, directory) == {case.case.id: case.case}
    here = {case.id for case in suites.load("smoke").cases}
    assert gate.cases_at_hand(checked, None).keys() == here
    assert gate.cases_at_hand(replace(checked, suite="somebody-elses"), None) == {}
