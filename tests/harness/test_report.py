import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import measured_on, reasons, report
from harness.case import Case
from harness.layout import Layout
from harness.result import Parity, Result, append, read

HELD = Parity(
    ok=True,
    lane="fp64",
    loss_max_relative=1e-16,
    gradient_norm_max_relative=0.0,
    gradient_max_relative=0.0,
    parameter_max_relative=0.0,
    worst_parameter=None,
    first_bad_step=None,
    explanation=None,
    replicas_bit_equal=True,
    tolerance={"loss": 1e-12},
)
PARTED = replace(
    HELD,
    ok=False,
    loss_max_relative=0.5,
    gradient_max_relative=1.0,
    first_bad_step=1,
    worst_parameter="block0.attention.projection.weight",
    explanation="every gradient is 2 times the reference's: the data degree",
    replicas_bit_equal=False,
)
METRICS = {
    "throughput.tokens_per_second": 14210.4,
    "step.median_seconds": 0.3061,
    "memory.peak_allocated_bytes.max_rank": 310 * 2**20,
    "memory.predicted_peak_bytes": 301.25 * 2**20,
    "communication.bytes_per_step": 64.5 * 2**20,
    "communication.textbook_bytes_per_step": 64 * 2**20,
    "communication.busy_ratio": 0.31,
    "communication.exposed_ratio": 0.0123,
    "communication.blocked_ratio": 0.002,
    "cpu.seconds_per_step": 0.61,
}


def result(implementation: str = "native.ddp", data: int = 2, **fields: Any) -> Result:
    options, workload = fields.pop("options", {}), fields.pop("workload", "gpt:size=17m")
    case = Case(workload=workload, implementation=implementation, layout=Layout(data=data), options=options)
    return Result(**{"case": case, "status": "ok", "suite": "smoke", **fields})


MEASURED = result(metrics=METRICS, parity=HELD, options={"transport": "shared_memory"})
ALONE = result("reference", 1, metrics={"throughput.tokens_per_second": 7000.0, "step.median_seconds": 0.6})
DIVERGED = result(data=4, status="parity failed", parity=PARTED, metrics=METRICS)
CRASHED = result("torch.ddp", status="failed", reason="rank 1: gone\nfar", culprit=1, traceback="Traceback:\n  x")
MISSING = result("torch.ddp", 8, status="unavailable", reason="No module named 'deepspeed'")
IMAGES = result(workload="convnet", metrics={"throughput.samples_per_second": 99.96, "step.median_seconds": 0.0005})
PARTED_AS_KNOWN = replace(DIVERGED, case=replace(DIVERGED.case, expected="parity failed"))
ALL = [ALONE, MEASURED, DIVERGED, CRASHED, MISSING, IMAGES]
RATIOS = [
    {
        "strategy": "data_parallel",
        "workload": "gpt:size=17m",
        "precision": "fp32",
        "layout": "data=2",
        "world_size": 2,
        "implementation": "native.ddp transport=shared_memory",
        "role": "subject",
        "best_peer": "torch.ddp",
        "median_seconds": 0.3061,
        "floor_seconds": 0.2943,
        "ratio": 0.8512,
        "floor_ratio": 1.04,
        "overhead_ratio": None,
        "rounds": 7,
        "spread": 0.012,
    }
]
THEIRS = {**RATIOS[0], "implementation": "torch.ddp", "role": "peer", "ratio": 1.0, "overhead_ratio": 1.0}


def shown(renderable: Any, width: int = 100) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(renderable)
    return file.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def markdown_rows(results: list[Result]) -> dict[str, dict[str, str]]:
    """{implementation layout: {header: cell}} of the first table."""
    lines = [line for line in report.markdown(results, [], Path("r")).splitlines() if line.startswith("|")]
    header, _, *rows = map(cells, lines)
    return {f"{row[0]} {row[1]}": dict(zip(header, row, strict=True)) for row in rows}


def test_figures_keep_three_digits_and_never_invent_a_zero() -> None:
    values = (None, 0.0, 14210.4, 99.96, 12.34, 1.234, 0.01234, 1.2e-7)
    assert [report.figure(value) for value in values] == [
        "-", "0", "14,210", "100.0", "12.3", "1.23", "0.0123", "1.2e-07",
    ]  # fmt: skip


def test_every_figure_stands_in_its_column_in_its_unit() -> None:
    assert markdown_rows([MEASURED])["native.ddp transport=shared_memory data=2"] == {
        "implementation": "native.ddp transport=shared_memory",
        "layout": "data=2",
        "tokens/s": "14,210",
        "step ms": "306",
        "peak MiB": "310",
        "plan MiB": "301",
        "sent MiB": "64.5",
        "textbook MiB": "64.0",
        "busy %": "31.0",
        "exposed %": "1.23",
        "blocked %": "0.2",
        "CPU s/step": "0.61",
        "parity": "ok",
        "status": "ok",
    }


def test_a_pipeline_shows_its_bubble_beside_theorys() -> None:
    metrics = {
        **METRICS,
        "pipeline.bubble_ratio": 0.31,
        "pipeline.replayed_bubble_ratio": 0.214,
        "pipeline.predicted_bubble_ratio": 0.2,
        "pipeline.in_flight_micro_batches": 2.0,
        "pipeline.predicted_in_flight_micro_batches": 2.0,
    }
    case = Case(workload="gpt:size=17m", implementation="native.pipeline", layout=Layout(pipeline=2))
    piped = replace(MEASURED, case=case, metrics=metrics)
    row = markdown_rows([piped])["native.pipeline pipeline=2"]
    shown_of = {name: row[name] for name in ("bubble %", "replayed %", "theory %", "in flight")}
    assert shown_of == {"bubble %": "31.0", "replayed %": "21.4", "theory %": "20.0", "in flight": "2 / 2"}
    assert markdown_rows([piped, MEASURED])["native.ddp transport=shared_memory data=2"]["in flight"] == "-"
    assert "bubble %" not in markdown_rows([MEASURED])["native.ddp transport=shared_memory data=2"]
    for width in (80, 100, 140):
        assert max(map(len, shown(report.table("t", [piped, MEASURED], width), width))) <= width


def test_what_is_not_known_is_a_dash() -> None:
    row = markdown_rows([ALONE])["reference single"]
    assert {name for name, cell in row.items() if cell == "-"} == row.keys() - {
        "implementation", "layout", "tokens/s", "step ms", "parity", "status",
    }  # fmt: skip


def test_a_parted_run_says_where_it_parts() -> None:
    assert markdown_rows([DIVERGED])["native.ddp data=4"]["parity"] == (
        "FAILED at step 1: block0.attention.projection.weight"
    )
    assert reasons.reasons(DIVERGED) == [
        "parity failed: native.ddp, data=4, gpt:size=17m, fp32",
        "every gradient is 2 times the reference's: the data degree",
        "off by, relative: loss 5.0e-01, gradient norm 0.0e+00, gradients 1.0e+00, parameters 0.0e+00",
        "allowed (fp64): loss 1.0e-12",
        "replicas differ between ranks",
    ]


def test_an_explanation_is_said_once_beside_another_reason() -> None:
    same = replace(DIVERGED, reason=PARTED.explanation)
    assert reasons.reasons(same) == reasons.reasons(DIVERGED)
    other = replace(DIVERGED, reason="the loss parts")
    assert reasons.reasons(other)[1:3] == ["the loss parts", f"explained by: {PARTED.explanation}"]


def test_a_failure_names_its_rank() -> None:
    assert reasons.reasons(CRASHED) == [
        "failed: torch.ddp, data=2, gpt:size=17m, fp32",
        "rank 1: gone far",
    ]


def test_a_fallback_is_said() -> None:
    facts = {"transport": "process_group", "transport_fallback": "ranks on several nodes", "num_buckets": "3"}
    fell_back = replace(MEASURED, environment={"facts": facts})
    assert reasons.departures(fell_back) == [
        "native.ddp transport=shared_memory, data=2: ran with transport=process_group (ranks on several nodes)"
    ]
    assert reasons.departures(replace(MEASURED, environment={"facts": {"transport": "shared_memory"}})) == []
    assert "ran with transport=process_group" in report.markdown([fell_back], [], Path("r"))


def test_the_machine_is_named() -> None:
    environment = {"device": {"name": "A CPU"}, "logical_cores": 2, "threads_per_rank": 1, "torch": "2.13.0"}
    assert measured_on.measured_on([CRASHED, replace(MEASURED, environment=environment)]) == [
        "measured on: A CPU, 2 cores, 1 thread(s) a rank, torch 2.13.0"
    ]
    assert measured_on.measured_on([CRASHED]) == []


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_terminal_report_fits(width: int) -> None:
    lines = shown(report.text(ALL, RATIOS, Path("results/x"), width), width)
    assert max(map(len, lines)) <= width
    text = " ".join(line.strip() for line in lines)
    for expected in ("tokens/s", "samples/s", "unavailable", "14,210", "0.851", "time /", report.MLFLOW_COMMAND):
        assert expected in text
    assert ("blocked" in text.split("parity failed:")[0]) == (width >= 140)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_ratios_are_one_line_a_row_where_they_fit_and_ours_stand_out(width: int) -> None:
    rows = [*RATIOS, THEIRS, {**RATIOS[0], "world_size": 4}]
    (title,) = report.ratio_groups(rows)
    assert title == "data_parallel, gpt:size=17m, fp32"
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system="standard").print(
        report.text([], rows, Path("r"), width)
    )
    lines = file.getvalue().splitlines()
    ours = [line for line in lines if "ours" in line]
    assert len(ours) == 2
    assert all("\x1b[1m" in line and "306" in line for line in ours)
    (theirs,) = [line for line in lines if "peer" in line and "306" in line and "ours" not in line]
    assert "\x1b[1m" not in theirs
    (header,) = [line for line in lines if "whose" in line]
    assert ("rounds" in header) == (width >= 120)
    between = lines[lines.index(theirs) + 1 : lines.index(ours[1])]
    assert [line.strip() for line in between] == [""], "two ranks and four stand apart"


def test_the_floor_says_what_it_is_and_has_no_verdict() -> None:
    case = replace(MEASURED.case, implementation="native.floor", options={}, role="floor")
    row = markdown_rows([replace(MEASURED, case=case, parity=None)])["native.floor (floor) data=2"]
    assert (row["parity"], row["status"]) == ("-", "ok")


def test_mlflow_is_named_by_its_path_where_the_shell_does_not_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"browser: {report.MLFLOW_COMMAND}" in report.where_to_look(Path("r"))[1]
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/mlflow").touch()
    assert f"browser: .venv/bin/{report.MLFLOW_COMMAND}" in report.where_to_look(Path("r"))[1]


def test_numbers_are_right_aligned() -> None:
    lines = shown(report.table("t", [ALONE, MEASURED]))
    ends = {line.index(text) + len(text) for text in ("14,210", "7,000") for line in lines if text in line}
    assert len(ends) == 1


def test_workloads_have_tables_of_their_own_with_their_own_unit() -> None:
    text = report.markdown(ALL, RATIOS, Path("r"))
    assert text.index("## gpt:size=17m, fp32") < text.index("## convnet, fp32")
    assert text.count("| tokens/s |") == text.count("| samples/s |") == 1
    assert "```text\nTraceback:\n  x\n```" in text
    assert "No module named 'deepspeed'" in text
    own = "| native.ddp transport=shared_memory | ours | 2 | 306 | 294 | torch.ddp | 0.851 | 1.04 | - | 0.012 | 7 |"
    assert own in text


def test_the_report_survives_the_results_file(tmp_path: Path) -> None:
    lost = replace(DIVERGED, parity=replace(PARTED, loss_max_relative=float("nan")))
    for each in (MEASURED, lost):
        append(tmp_path, each)
    (tmp_path / "ratios.json").write_text(json.dumps(RATIOS))
    report.write(tmp_path, read(tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert "loss nan" in text
    assert "## Ratios: data_parallel, gpt:size=17m, fp32" in text


@pytest.mark.parametrize("content", ["[", "{}", '[{"ratio": 1}]', "[3]"])
def test_a_broken_ratio_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "ratios.json").write_text(content)
    with pytest.raises(ValueError, match=r"ratios\.json: expected"):
        report.read_ratios(tmp_path)


@pytest.mark.parametrize(
    ("results", "success"),
    [
        ([MEASURED, MISSING], True),
        ([MEASURED, CRASHED], False),
        ([DIVERGED], False),
        ([MEASURED, PARTED_AS_KNOWN], True),
    ],
)
def test_only_what_failed_fails_a_run(results: list[Result], success: bool) -> None:
    assert report.is_success(results) is success


def test_a_case_that_parts_as_it_is_known_to_says_so_with_its_explanation() -> None:
    assert markdown_rows([PARTED_AS_KNOWN])["native.ddp data=4"]["status"] == "parity failed, as expected"
    first, *rest = reasons.reasons(PARTED_AS_KNOWN)
    assert first == "parity failed, as expected: native.ddp, data=4, gpt:size=17m, fp32"
    assert rest == reasons.reasons(DIVERGED)[1:]
    lines = shown(report.text([PARTED_AS_KNOWN], [], Path("r"), 160), width=160)
    assert sum("parity failed, as expected" in line for line in lines) == 2


def test_other_work_and_parity_that_nobody_checked_are_labelled() -> None:
    clipped = replace(MEASURED, other_work="clipped at 1")
    row = markdown_rows([clipped])["native.ddp transport=shared_memory data=2"]
    assert (row["parity"], row["status"]) == ("ok, other work", "ok, other work")
    assert "other work: clipped at 1" in "\n".join(shown(report.text([clipped], [], Path("r"))))
    assert "other work: clipped at 1" in report.markdown([clipped], [], Path("r"))
    (unchecked,) = markdown_rows([replace(MEASURED, parity=None)]).values()
    assert (unchecked["parity"], unchecked["status"]) == ("not checked", "ok")
    ratios = [{**RATIOS[0], "parity": "ok", "other_work": "clipped at 1"}, {**THEIRS, "parity": "not checked"}]
    table = report.markdown([], ratios, Path("r"))
    assert "| ok, other work |" in table
    assert "| not checked |" in table


def test_an_empty_cell_of_a_prediction_says_why_once_for_each_implementation() -> None:
    why = {"states": "it is its own choice", "bytes": "it is its own choice", "peak": "no step is known"}
    unknown = [result("torch.tensor", data, metrics=METRICS, parity=HELD, unpredicted=why) for data in (2, 4)]
    lines = [
        "torch.tensor predicts no states and no bytes because it is its own choice",
        "torch.tensor predicts no peak because no step is known",
    ]
    table = report.markdown([*unknown, MEASURED], [], Path("r")).partition("## Where")[0].splitlines()
    assert [line.removeprefix("- ") for line in table if line.startswith("- ")] == lines
    assert [line.strip() for line in shown(report.text(unknown, [], Path("r"))) if "predicts no" in line] == lines


@pytest.mark.parametrize(
    ("environment", "is_told"),
    [
        ({"device": {"kind": "cpu"}, "logical_cores": 4}, True),
        ({"device": {"kind": "cpu"}, "logical_cores": 2}, False),  # four ranks take turns on two processors
        ({"device": {"kind": "cuda"}, "logical_cores": 2}, True),
        ({}, True),
    ],
)
def test_a_straggler_is_told_where_ranks_do_not_take_turns(environment: dict[str, Any], is_told: bool) -> None:
    case = replace(MEASURED.case, layout=Layout(data=4))
    samples = {"fixed_work_seconds": [[0.1, 0.25, 0.1, 0.1]]}
    told = reasons.departures(replace(MEASURED, case=case, environment=environment, samples=samples))
    assert any("rank 1 is a straggler" in line for line in told) == is_told


@pytest.mark.parametrize("name", ["[bold]", "[/]", "[red]x[/red]"])
def test_titles_that_look_like_markup_stay_what_they_are(name: str) -> None:
    workload = f"gpt:note={name}"
    assert shown(report.table(workload, [MEASURED]))[0].strip() == workload
    ratios = [{**RATIOS[0], "workload": workload}]
    assert workload in "\n".join(shown(report.text([MEASURED], ratios, Path("night"))))
