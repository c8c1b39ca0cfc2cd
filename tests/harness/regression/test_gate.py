"""The gate as a person meets it, on a real store: run, check, accept, and one byte too many."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cli, suites, tracking
from harness.regression import gate
from harness.regression.history import from_results, from_store
from harness.result import read
from harness.run_record import SUITES_EXPERIMENT
from harness.topology import Topology
from tests.harness.regression.stored_nights import BYTES, CASE, ENVIRONMENT, NIGHT, case_tags, results_of, uploaded

pytestmark = pytest.mark.usefixtures("elsewhere")


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
    assert (found.metrics["loss"], found.parity_steps) == (2.5, 4)
    assert (found.expected, found.emulated) == ("ok", False)
    assert from_store(tracking.read_runs(suite="peers")) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {**ENVIRONMENT, "emulated": True}},
        {"case": replace(CASE, topology=Topology(num_nodes=2, ranks_per_node=1, link_mbits=200.0))},
        {"case": replace(CASE, topology=Topology(num_nodes=2, ranks_per_node=1, delay_ms=5.0))},
    ],
)
def test_emulated_links_are_told_by_their_mark_or_their_topology(changes: dict[str, Any]) -> None:
    directory = uploaded(1, **changes)
    (stored,) = from_store(tracking.read_runs(suite="smoke"))
    assert stored.emulated
    assert replace(stored, run_id="") == from_results(read(directory), directory)[0]


def test_a_case_that_parts_as_expected_is_no_trouble_of_the_gates(capsys: pytest.CaptureFixture[str]) -> None:
    """`run` ends with 0 there, and so does `check`."""
    uploaded(1, case=replace(CASE, expected="parity failed"), status="parity failed", reason="clips at 1.0")
    assert cli.main(["check"]) == 0
    assert "not red: smoke-1: 1 ok" in capsys.readouterr().out


def suite_run_named(name: str) -> dict[str, Any]:
    (found,) = (run for run in tracking.read_runs(SUITES_EXPERIMENT) if run["tags.meshmark.suite_run"] == name)
    return found


def test_the_suite_run_has_the_verdicts_in_one_word_and_on_a_page() -> None:
    uploaded(1)
    assert cli.main(["check"]) == 0
    assert cli.main(["accept"]) == 0
    directory = uploaded(2, metrics={"step.median_seconds": 0.1, BYTES: 1001.0})
    assert suite_run_named("smoke-1")["tags.verdict"] == "ok"
    for arguments in (["check"], ["check", "--results", str(directory)]):
        tracking.set_tags({run["run_id"]: {"verdict": "-"} for run in tracking.read_runs()})
        assert cli.main(arguments) == 1
        assert suite_run_named("smoke-2")["tags.verdict"] == "red"
        assert case_tags()["smoke-2"]["tags.verdict"] == "regressed"
        run_id = suite_run_named("smoke-2")["run_id"]
        page = tracking.read_artifacts([run_id], gate.VERDICTS_FILE)[run_id]
        assert page.startswith("**RED: smoke-2: 1 regressed**")


def test_the_suite_that_is_asked_for_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    uploaded(1)
    uploaded(2, suite="pitfalls", suite_run="pitfalls-2")
    for arguments, name in ((["check"], "pitfalls-2"), (["check", "--suite", "smoke"], "smoke-1")):
        assert cli.main([*arguments, "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["suite_run"] == name
    assert cli.main(["accept", "--suite", "smoke"]) == 0
    assert [path.name for path in Path("accepted").iterdir()] == ["smoke.txt"]
    capsys.readouterr()
    assert cli.main(["check", "--suite", "none"]) == 2
    assert "expected at least one suite run of none, found none" in capsys.readouterr().err
    assert cli.main(["check", "--suite", "smoke", "--results", "night-2"]) == 2
    assert "night-2: expected at least one suite run of smoke, found none" in capsys.readouterr().err
    assert cli.main(["check", "--suite", "smoke", "--suite-run", "pitfalls-2"]) == 2
    assert "expected one of smoke of sqlite" in capsys.readouterr().err


def test_a_run_that_is_not_of_today_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """As after a night when the run itself has died."""
    uploaded(1)

    def notes(*, hours: float, suite_run: str | None = None) -> list[str]:
        now = NIGHT + 1 + 3600 * hours
        judged = gate.judged(suite_run=suite_run, results=None, accepted_directory=None, now=now)
        return [note for note in judged.notes if "began" in note]

    assert notes(hours=2) == []
    assert notes(hours=24) == ["smoke-1 began 24 hours ago, and no run after it is there"]
    assert notes(hours=72) == ["smoke-1 began 3 days ago, and no run after it is there"]
    assert notes(hours=72, suite_run="smoke-1") == [], "it was asked for"


def test_accepted_values_of_the_checkout_are_found_from_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    uploaded(1)
    (tmp_path / ".git").mkdir()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert cli.main(["check", "--format", "json"]) == 0
    (note,) = (note for note in json.loads(capsys.readouterr().out)["notes"] if "held against" in note)
    assert f"yet in {tmp_path}/accepted/smoke.txt: `meshmark accept`" in note
    assert cli.main(["accept"]) == 0
    assert (tmp_path / "accepted/smoke.txt").is_file()
    capsys.readouterr()
    assert cli.main(["check", "--format", "json"]) == 0
    assert "held against" not in capsys.readouterr().out


def test_from_the_first_night_to_an_accepted_change(capsys: pytest.CaptureFixture[str]) -> None:
    first = uploaded(1)
    assert cli.main(["check"]) == 0, "nothing is nominated"
    shown = capsys.readouterr().out
    assert "insufficient data" in shown
    assert "1 with exact figures that nothing is held against yet" in shown

    assert cli.main(["accept"]) == 0
    assert f"native.ddp data=2: {BYTES} - -> 1,000" in capsys.readouterr().out
    (_, *lines) = Path("accepted/smoke.txt").read_text().splitlines()
    assert [line.split()[1:] for line in lines] == [["cpu", BYTES, "1000"], ["cpu", "loss.after_4_steps", "2.5"]]
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


def test_what_our_code_refuses_is_red_until_it_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    uploaded(1)
    refused = uploaded(2, status="unsupported", reason="no two ranks", environment={}, metrics={}, samples={})
    assert cli.main(["check"]) == 1
    assert "RED: smoke-2: 1 failed" in capsys.readouterr().out
    assert cli.main(["accept"]) == 0
    assert "native.ddp data=2: accepted_absence smoke-2 (ran until smoke-1)" in capsys.readouterr().out
    (_, line) = Path("accepted/smoke.txt").read_text().splitlines()
    assert line.split()[1:] == ["cpu", "accepted_absence", "2025-01-01T00:00:02Z"]
    assert "tags.accepted" in case_tags()["smoke-2"]
    assert cli.main(["check", "--results", str(refused), "--no-upload"]) == 0
    assert cli.main(["accept"]) == 0
    assert "nothing to accept" in capsys.readouterr().out


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
