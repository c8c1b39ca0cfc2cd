import json
import math
from pathlib import Path
from typing import Any

import pytest

from harness.case import Case
from harness.layout import Layout
from harness.result import RESULTS_FILE, Parity, Result, append, read, replace_non_finite

PARITY = Parity(
    ok=False,
    lane="fp64",
    loss_max_relative=1e-16,
    gradient_norm_max_relative=0.0,
    gradient_max_relative=0.5,
    parameter_max_relative=0.25,
    worst_parameter="weight",
    first_bad_step=0,
    explanation="doubled",
    replicas_bit_equal=True,
    tolerance={"loss": 1e-12},
)


def result(name: str = "native.ddp", **others: Any) -> Result:
    case = Case(workload="gpt", implementation=name, layout=Layout(data=2))
    return Result(**{"case": case, "status": "ok", **others})


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    full = result(
        status="parity failed",
        reason="doubled",
        environment={"torch": "2.13.0"},
        metrics={"step.median_seconds": 0.25},
        parity=PARITY,
        samples={"step_seconds": [[0.25, 0.5]]},
        culprit=1,
        traceback="Traceback\n  é",
        strategy="ddp",
        suite="smoke",
        suite_run="smoke-1",
        started=12.5,
        duration_seconds=3.5,
    )
    append(tmp_path, full)
    (found,) = read(tmp_path)
    assert found.to_json() == full.to_json()
    assert found.parity == PARITY
    assert json.loads((tmp_path / RESULTS_FILE).read_text())["case"]["id"] == full.case.id


def test_the_last_result_of_a_case_counts(tmp_path: Path) -> None:
    for each in (result(status="failed"), result("torch.ddp"), result(status="ok")):
        append(tmp_path, each)
    assert [(r.case.implementation, r.status) for r in read(tmp_path)] == [("native.ddp", "ok"), ("torch.ddp", "ok")]


@pytest.mark.parametrize("cut", [1, 40, -2])
def test_a_torn_last_line_is_left_out_and_not_glued_to_the_next(cut: int, tmp_path: Path) -> None:
    path = tmp_path / RESULTS_FILE
    append(tmp_path, result())
    whole = path.read_bytes()
    append(tmp_path, result("torch.ddp", reason="é" * 10))
    path.write_bytes(path.read_bytes()[: len(whole) + cut] if cut > 0 else path.read_bytes()[:cut])
    assert [r.case.implementation for r in read(tmp_path)] == ["native.ddp"]
    append(tmp_path, result("reference"))
    assert [r.case.implementation for r in read(tmp_path)] == ["native.ddp", "reference"]
    assert path.read_bytes().startswith(whole)


def test_a_last_line_that_lacks_nothing_but_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / RESULTS_FILE
    append(tmp_path, result())
    path.write_bytes(path.read_bytes().rstrip())
    append(tmp_path, result("reference"))
    assert [r.case.implementation for r in read(tmp_path)] == ["native.ddp", "reference"]


def test_a_character_torn_in_two_is_a_torn_line_too(tmp_path: Path) -> None:
    append(tmp_path, result())
    with (tmp_path / RESULTS_FILE).open("ab") as file:
        file.write('{"case": "é'.encode()[:-1])
    assert len(read(tmp_path)) == 1


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    append(tmp_path, result())
    with (tmp_path / RESULTS_FILE).open("a") as file:
        file.write("{}\n")
    append(tmp_path, result("reference"))
    with pytest.raises(ValueError, match=r"results\.jsonl, line 2: not a result: KeyError: 'case'"):
        read(tmp_path)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / RESULTS_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write a result: No space left on device: '.*results\.jsonl'"):
        append(tmp_path, result())
    with pytest.raises(OSError, match=r"cannot write a result: No such file or directory"):
        append(tmp_path / "nowhere", result())


def test_a_directory_without_results(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a results directory with results\.jsonl, found none"):
        read(tmp_path)


def test_what_is_not_a_number_is_text_in_samples_and_refused_in_metrics(tmp_path: Path) -> None:
    append(tmp_path, result(samples={"losses": [1.0, math.nan, math.inf, -math.inf]}))
    assert read(tmp_path)[0].samples == {"losses": [1.0, "nan", "inf", "-inf"]}
    assert replace_non_finite({"a": (math.nan, {"b": 2})}) == {"a": ["nan", {"b": 2}]}
    with pytest.raises(ValueError, match=r"metrics must be finite, got a\.b"):
        result(metrics={"a.b": math.nan, "c": 1.0})
    with pytest.raises(ValueError, match=r"status must be one of ok, unsupported, .*, got 'fine'"):
        result(status="fine")
