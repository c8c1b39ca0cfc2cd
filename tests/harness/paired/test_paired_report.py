"""The report of a comparison, whole, in each of its forms."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from harness import tracking
from harness.case import Case, Measurement, Suite
from harness.layout import Layout
from harness.paired import paired_report
from harness.paired.builds import Build
from harness.paired.in_turns import ComparedCase, ComparedVerdict
from harness.paired.paired_report import PairedRun
from harness.paired.paired_run import timed_cases
from harness.paired.side import Timing
from harness.regression.paired_comparison import compare

A = Build(name="main", commit="0123456789abcdef", source=Path(), python=Path(), scratch=Path())
B = Build(name="fedcba98", commit="fedcba9876543210", source=Path(), python=Path(), scratch=Path())


def case(implementation: str, layout: Layout | None = None, **fields: object) -> Case:
    return Case(workload="gpt", implementation=implementation, layout=layout or Layout(data=2), **fields)  # type: ignore[arg-type]


def compared(verdict: ComparedVerdict, of: Case, factor: float) -> ComparedCase:
    a = [0.1 + 0.0001 * number for number in range(10)]
    b = [factor * seconds for seconds in a]
    return ComparedCase(
        case=of,
        verdict=verdict,
        comparison=compare(a, b),
        p_value=0.004,
        a=tuple(Timing(status="ok", seconds=seconds, steps=[[seconds], [seconds]]) for seconds in a),
        b=tuple(Timing(status="ok", seconds=seconds) for seconds in b),
    )


def run(*cases: ComparedCase) -> PairedRun:
    ordered = paired_report.worst_first(cases)
    return PairedRun(a=A, b=B, suite="nightly", started=1_893_456_000.0, ended=1_893_456_060.0, cases=ordered)


SLOW = compared("regressed", case("native.ddp"), 1.1)
FINE = compared("ok", case("torch.ddp"), 1.0)
LOST = ComparedCase(
    case=case("native.zero"), verdict="failed", reason="fedcba98: no | memory", a=(), b=(Timing(status="failed"),)
)


def test_the_worst_comes_first_and_the_summary_counts() -> None:
    found = run(FINE, SLOW, LOST)
    assert [each.verdict for each in found.cases] == ["failed", "regressed", "ok"]
    assert found.is_red
    assert paired_report.summary(found) == (
        "RED: nightly, B fedcba98 against A main (01234567): 1 failed, 1 regressed, 1 ok"
    )
    assert not run(FINE).is_red
    missing = ComparedCase(case=LOST.case, verdict="not compared", reason="x", a=(), b=())
    assert not run(FINE, missing).is_red
    assert run(missing).is_red
    assert paired_report.summary(run(missing)).endswith(": 1 not compared, so there is no verdict")


def test_markdown_has_every_case_and_every_reason() -> None:
    page = paired_report.markdown(run(FINE, SLOW, LOST))
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert rows[0] == "| verdict | case | workload | A ms | B ms | B takes | interval | p | pairs |"
    assert rows[2] == (
        "| regressed | native.ddp data=2 | gpt, fp32 | 100 | 110 | +10.0% | +10.0% to +10.0% | 0.004 | 10 |"
    )
    assert rows[1] == "| failed | native.zero data=2 | gpt, fp32 | - | - | - | - | - | - |"
    assert "- native.zero data=2: fedcba98: no \\| memory" in page


def test_a_terminal_shows_the_same() -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(paired_report.text(run(SLOW, LOST)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"regressed +native.ddp data=2 +gpt, fp32 +100 +110 +\+10.0%", shown)
    assert "no | memory" in shown


def test_json_keeps_every_time(tmp_path: Path) -> None:
    path = paired_report.write(run(SLOW, LOST), tmp_path / "new")
    data = json.loads(path.read_text())
    slow = data["cases"][1]
    assert slow["case"]["id"] == SLOW.case.id
    assert [timing["seconds"] for timing in slow["a"]] == [timing.seconds for timing in SLOW.a]
    assert slow["a"][0]["steps"] == [[0.1], [0.1]]
    assert (data["red"], data["a"]["commit"], data["b"]["name"]) == (True, A.commit, "fedcba98")


def test_the_store_has_one_run_for_it_that_is_no_night_of_any_case(tmp_path: Path, empty_store: Path) -> None:
    from harness.regression.history import from_store

    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    found = run(SLOW, LOST)
    for expected in ("1 runs uploaded, 0 already there", "0 runs uploaded, 1 already there"):
        assert expected in tracking.send([paired_report.record(found)], kept=tmp_path, tracking_uri=uri).message
    (stored,) = tracking.read_runs(paired_report.COMPARISONS_EXPERIMENT, tracking_uri=uri)
    assert stored[f"metrics.shift/{SLOW.case.id}"] == pytest.approx(0.1)
    assert (stored["metrics.cases.regressed"], stored["metrics.cases.ok"]) == (1, 0)
    assert (stored["tags.verdict"], stored["tags.commit_a"]) == ("failed", A.commit)
    assert from_store([stored]) == []


def test_what_is_timed_is_what_takes_time() -> None:
    untimed = case("native.ddp", precision="fp64", measurement=Measurement(timed_steps=0))
    reference = case("reference", Layout(), role="reference")
    peer = case("deepspeed.zero", role="peer")
    suite = Suite(name="x", cases=(reference, untimed, case("native.ddp"), peer))
    assert timed_cases(suite) == [case("native.ddp"), peer]
    assert timed_cases(suite, only_family="deepspeed") == [peer]
    assert timed_cases(suite, only_family="torch") == [case("native.ddp"), peer]
    with pytest.raises(ValueError, match="suite x: expected cases that are timed, found none"):
        timed_cases(Suite(name="x", cases=(reference, untimed)))
