"""The gate as a person meets it, where it times in turns what looks slower: whatever happens, no verdict is lost."""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from harness import cli, tracking
from harness.case import Case
from harness.paired import paired_run
from harness.paired.builds import Build
from harness.paired.in_turns import ComparedCase
from harness.paired.paired_report import COMPARISONS_EXPERIMENT, PairedRun
from harness.paired.side import Timing
from harness.regression import gate
from harness.regression.paired_comparison import Comparison
from harness.result import append, read
from harness.run_record import case_record
from tests.harness.regression.stored_nights import ENVIRONMENT, NIGHT, case_tags, results_of


@pytest.fixture(scope="module")
def filled_store(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A directory with 26 nights in its store, slower from night 20 on, and the results of the last: filled once, since
    that takes longer than the rest of a test."""
    filled = tmp_path_factory.mktemp("nights")
    shutil.copy(empty_store, filled / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(filled)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
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
    return filled


@pytest.fixture
def slower_since_night_20(elsewhere: None, filled_store: Path) -> Path:
    """The results directory of the last of 26 nights, all of which are in the store."""
    shutil.copy(filled_store / "mlflow.db", "mlflow.db")
    return Path(shutil.copytree(filled_store / "night-0", "night-0"))


def test_what_looks_slower_is_timed_in_turns_unless_it_cannot_be_or_must_not(
    slower_since_night_20: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["check", "--results", str(slower_since_night_20), "--format", "markdown", "--no-upload"]
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


@pytest.mark.parametrize("when", ["looking for cases", "timing"])
@pytest.mark.parametrize(
    ("signal_number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_confirmation_that_is_interrupted_loses_no_verdict(
    when: str,
    signal_number: signal.Signals,
    exit_code: int,
    slower_since_night_20: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        signal.raise_signal(signal_number)

    where = (paired_run, "run") if when == "timing" else (gate, "cases_at_hand")
    monkeypatch.setattr(*where, interrupted)
    arguments = ["check", "--results", str(slower_since_night_20), "--format", "markdown", "--confirm"]
    assert cli.main(arguments) == exit_code
    page = capsys.readouterr().out
    assert page.startswith("**RED: smoke-25: 1 regressed (by history)**")
    assert "- timing in turns was interrupted: what it has not said stays as the history says" in page
    assert case_tags()["smoke-25"]["tags.verdict"] == "regressed"


@pytest.mark.parametrize("where", [(paired_run, "run"), (gate, "cases_at_hand")], ids=["timing", "looking for cases"])
def test_without_git_or_room_it_costs_a_note(
    where: tuple[object, str],
    slower_since_night_20: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "git")

    monkeypatch.setattr(*where, fails)
    arguments = ["check", "--results", str(slower_since_night_20), "--format", "markdown", "--confirm", "--no-upload"]
    assert cli.main(arguments) == 1
    page = capsys.readouterr().out
    assert page.startswith("**RED: smoke-25: 1 regressed (by history)**")
    assert r"timed in turns: \[Errno 2\] No such file or directory: 'git'" in page


def test_the_pairs_are_kept_and_recorded(
    slower_since_night_20: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = Timing(status="ok", seconds=0.1, steps=[[0.1]])

    def run(suite: str, cases: list[Case], opened: object, **options: object) -> PairedRun:
        a, b = (
            Build(name=commit, commit=commit, source=Path(), python=Path(), scratch=Path())
            for commit in (f"{19:040x}", f"{25:040x}")
        )
        comparison = Comparison(num_pairs=10, shift=0.1, interval=(0.08, 0.12), p_value=0.001)
        compared = ComparedCase(
            case=cases[0], verdict="regressed", comparison=comparison, p_value=0.001, a=(timing,) * 10, b=(timing,) * 10
        )
        return PairedRun(a=a, b=b, suite=suite, started=NIGHT, ended=NIGHT + 1, cases=(compared,))

    monkeypatch.setattr(paired_run, "run", run)
    assert cli.main(["check", "--results", str(slower_since_night_20), "--format", "markdown", "--confirm"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("**RED: smoke-25: 1 regressed (confirmed)**")
    (kept,) = Path("results").glob("compare-smoke-00000000-*/pairs.json")
    assert len(json.loads(kept.read_text())["cases"][0]["a"]) == 10
    assert str(kept) in captured.out.replace("\\", "")
    assert "1 runs uploaded" in captured.err
    (recorded,) = tracking.read_runs(COMPARISONS_EXPERIMENT)
    assert recorded["tags.verdict"] == "regressed"
