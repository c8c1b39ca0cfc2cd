"""A dashboard on its way: from MLflow's artifacts, into MLflow, and linked where people look."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness import cli, tracking
from harness.choosing import dashboards, origins, sources, tracker_views
from harness.choosing.candidates import Place, latest
from harness.result import Result, append
from tests.harness.choosing.scenes import EVERYTHING, ON_ONE_NODE, result

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results, beside a store that has them."""
    made = tmp_path_factory.mktemp("store") / "results"
    made.mkdir()
    for one in EVERYTHING:
        append(made, one)
    assert tracking.upload(made, tracking_uri=f"sqlite:///{made.parent}/mlflow.db").failed == 0
    return made


@pytest.fixture
def here(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(directory.parent)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return directory


def test_from_the_store_and_back_into_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly", reason="plotly is an extra")
    assert cli.main(["dashboard", "--suite-run", "sharding-20300101", "--predict", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"dashboard.html: {len(EVERYTHING)} cases of sharding-20300101",
        "in MLflow beside sharding-20300101",
    ]
    text = Path("dashboard.html").read_text(encoding="utf-8")
    runs = tracking.read_runs()
    (of_suite,) = (run for run in runs if not sources.case_id(run) and sources.suite_run(run) == "sharding-20300101")
    assert tracking.read_artifacts([of_suite["run_id"]], dashboards.ARTIFACT) == {of_suite["run_id"]: text}
    tags = {}
    tracking.change_experiment_tags(lambda _, name, found: tags.update({name: dict(found)}) or {})  # type: ignore[func-returns-value]
    assert tags.keys() == {"meshmark/gpt", "meshmark/suites"}
    link = f"/runs/{of_suite['run_id']}/artifacts/dashboard.html): which strategy to choose."
    assert all(link in of_experiment["mlflow.note.content"] for of_experiment in tags.values())
    assert "viewStateShareKey=meshmark-choose" in tags["meshmark/gpt"]["mlflow.note.content"]
    assert tags["meshmark/gpt"][tracker_views.TAG] == tracker_views.view("tokens")
    assert tracker_views.TAG not in tags["meshmark/suites"]
    # A second time nothing is doubled, and the upload still finds its runs as they were.
    assert cli.main(["dashboard", "--suite-run", "sharding-20300101", "--predict", "0"]) == 0
    tracking.change_experiment_tags(
        lambda _, name, found: (
            {} if found["mlflow.note.content"] == tags[name]["mlflow.note.content"] else {"changed": "1"}
        )
    )
    tracking.change_experiment_tags(lambda _, name, found: pytest.fail(name) if "changed" in found else {})
    assert tracking.upload(here).uploaded == 0


def test_results_come_back_from_the_store_as_they_were(here: Path) -> None:
    def ordered(results: list[Result]) -> list[str]:
        return sorted(json.dumps(one.to_json(), sort_keys=True) for one in results)

    runs = sources.case_runs_in_store()
    assert ordered(sources.from_store(runs, ["sharding-20300101"])) == ordered(sources.from_directories([here]))
    with pytest.raises(ValueError, match=r"--suite-run other: expected a suite run in MLflow, such as "):
        sources.from_store(runs, ["other"])


def test_of_each_suite_the_latest_run_counts(here: Path, tmp_path: Path) -> None:
    for number, suite_run in enumerate(("night-1", "night-2")):
        append(tmp_path, replace(EVERYTHING[1], suite="nightly", suite_run=suite_run, started=1.7e9 + number))
        tracking.upload(tmp_path)
    runs = sources.case_runs_in_store()
    assert {one.suite_run for one in sources.from_store(runs)} == {"night-2", "sharding-20300101"}
    assert sorted(night.suite_run for night in sources.nights_from_store(runs, {"nightly"})) == ["night-1", "night-2"]


def test_a_run_of_some_cases_leaves_the_others_to_the_one_before(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `meshmark run partly --only zero` leaves them."""
    pytest.importorskip("plotly", reason="plotly is an extra")
    whole = [replace(one, suite="partly", num_suite_cases=5) for one in ON_ONE_NODE[:5]]
    for number, cases in enumerate((whole, whole, whole[3:4])):
        directory = tmp_path / f"partly-{number}"
        directory.mkdir()
        for one in cases:
            append(directory, replace(one, suite_run=f"partly-{number}", started=1.74e9 + number))
        tracking.upload(directory)
    runs = [run for run in sources.case_runs_in_store() if run["tags.suite"] == "partly"]
    found = sources.from_store(runs)
    assert {one.suite_run for one in found} == {"partly-2", "partly-1"}
    assert len(latest(found)) == 5
    assert origins.completed(found) == ["suite partly: 1 case of partly-2, 4 of partly-1"]
    assert cli.main(["choose", "--devices", "2", "--memory", "1GiB"]) == 0
    said = capsys.readouterr().out
    assert "native.ddp" in said
    assert "note: suite partly: 1 case of partly-2, 4 of partly-1" in " ".join(said.split())
    assert cli.main(["dashboard", "--predict", "0", "--no-upload", "--out", str(tmp_path / "page.html")]) == 0
    assert "suite partly: 1 case of partly-2, 4 of partly-1\n" in capsys.readouterr().out


def test_a_suite_run_that_is_dated_ahead_is_taken_only_by_its_name(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suite_run, started in (("evening-1", 1.7e9), ("evening-9", 4e9)):
        append(tmp_path, replace(EVERYTHING[1], suite="evening", suite_run=suite_run, started=started))
        tracking.upload(tmp_path)
    runs = [run for run in sources.case_runs_in_store() if run["tags.suite"] == "evening"]
    kept, warning = sources.dated_soundly(runs, (), 1.8e9)
    assert {one.suite_run for one in sources.from_store(kept)} == {"evening-1"}
    assert [night.suite_run for night in sources.nights_from_store(kept, {"evening"})] == ["evening-1"]
    assert warning == (
        "dated ahead of this machine's clock, and passed over: evening-9 (2096-10-02 07:06 UTC); --suite-run takes one "
        "all the same"
    )
    assert sources.dated_soundly(runs, ("evening-9",), 1.8e9) == (runs, None)
    assert sources.dated_soundly(runs, (), 1.6e9) == (runs, None), "there is no other"
    assert cli.main(["choose", "--devices", "2", "--memory", "1GiB"]) == 0
    assert f"meshmark: {warning}\n" in capsys.readouterr().err


def test_without_a_store_one_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert cli.main(["dashboard"]) == 2
    assert "expected a suite run in MLflow, found none" in capsys.readouterr().err


def test_a_description_that_people_wrote_stays() -> None:
    run = {"experiment_id": "1", "run_id": "r", f"tags.{tracking.SUITE_RUN_TAG}": "smoke](http://elsewhere) <b>"}
    once = dashboards.described("Ours.\n\nDo not touch.", run, "2")
    assert once.startswith("Ours.\n\nDo not touch.\n\n<!-- meshmark dashboard -->\n[Dashboard of smoke")
    assert "](http://elsewhere)" not in once, "a name makes no link"
    again = dashboards.described(f"{once}\n\nAfter.", run, None)
    assert again.count("[Dashboard of") == 1
    assert "After." in again
    assert "viewStateShareKey" not in again


def test_what_is_predicted_by_itself_is_twice_the_most_that_was_measured() -> None:
    said: list[str] = []
    own = result("native.ddp", workload="gpt:size=tiny")
    slower = result("native.ddp", workload="gpt:size=tiny", options={"bucket_bytes": 1000}, speed=1)
    found = dashboards.predictions([own, slower], None, said.append)
    assert [(one.label, one.place, one.basis) for one in found] == [("native.ddp", Place(num_devices=4), "predicted")]
    assert said == ["predicting native.ddp data=4"], "of each strategy the fastest setting"
    clipped = result("native.ddp", workload="gpt:size=tiny", options={"x": 1}, speed=9000, other_work="clipped at 1")
    (again,) = dashboards.predictions([own, slower, clipped], None, said.append)
    assert again.label == "native.ddp", "none that does other work"
    assert dashboards.predictions([own], [], said.append) == []


def test_a_view_is_in_the_tracker_s_words() -> None:
    view = json.loads(tracker_views.view("samples"))
    assert view["orderByKey"] == "metrics.`throughput.samples_per_second`"
    assert {"tags.`strategy`", "tags.`status`", "tags.`other_work`"} <= set(view["selectedColumns"])
    scatter = view["compareRunCharts"][0]
    assert (scatter["type"], scatter["yaxis"]) == (
        "SCATTER",
        {"key": "throughput.samples_per_second", "type": "METRIC"},
    )
    assert len(tracker_views.view("samples")) < 5000, "a tag holds no more"


def test_the_tracker_whose_words_these_are_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("mlflow==")], "its form of a view is promised by nobody"


def test_a_workload_that_is_not_here_has_no_predictions_and_costs_a_line() -> None:
    said: list[str] = []
    assert dashboards.predictions([result("native.ddp", workload="gone.py:build")], [4], said.append) == []
    assert said[-1].startswith("no predictions for gone.py:build: ")
