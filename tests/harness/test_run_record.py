"""Run records: what MLflow is told of a result, without MLflow."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from harness.case import Case
from harness.layout import Layout
from harness.result import Parity, Result, logs_of
from harness.run_record import MAX_LOG_BYTES, MAX_PARAM_LENGTH, case_record, experiment_of, suite_record, suite_runs

HERE = Path("night")
CASE = Case(
    workload="gpt:size=17m,width=384,global_batch_size=8",
    implementation="native.ddp",
    layout=Layout(data=2),
    options={"reduction": "ring", "overlap": True},
)
PARITY = Parity(
    ok=True,
    lane="fp64",
    loss_max_relative=1e-15,
    gradient_norm_max_relative=2e-15,
    gradient_max_relative=3e-15,
    parameter_max_relative=4e-15,
    worst_parameter="head.weight",
    first_bad_step=None,
    explanation=None,
    replicas_bit_equal=True,
    tolerance={"loss": 1e-12},
)


def result(**changes):
    given = {"case": CASE, "status": "ok", "suite": "smoke", "suite_run": "s1", "started": 100.0}
    return Result(**{**given, **changes})


@pytest.mark.parametrize(
    ("workload", "experiment"),
    [
        ("gpt", "meshmark/gpt"),
        ("gpt:size=17m,tied=true", "meshmark/gpt"),
        ("path/to/mine.py:builder", "meshmark/mine.builder"),
        ("/abs/my file.py:builder:width=3", "meshmark/my_file.builder"),
    ],
)
def test_one_experiment_for_a_workload_whatever_its_options(workload, experiment):
    assert experiment_of(workload) == experiment


def test_a_case_as_tags_params_and_metrics():
    environment = {"machine_fingerprint": "m", "environment_fingerprint": "e", "commit": "c", "dirty": False}
    record = case_record(
        result(metrics={"step.median_seconds": 0.1}, parity=PARITY, environment=environment, strategy="ddp"), HERE
    )
    assert record.tags == {
        "suite": "smoke",
        "machine_fingerprint": "m",
        "environment_fingerprint": "e",
        "commit": "c",
        "dirty": "false",
        "implementation": "native.ddp",
        "strategy": "ddp",
        "role": "subject",
        "status": "ok",
        "lane": "fp64",
        "emulated": "false",
    }
    assert record.params["layout"] == "data=2"
    assert record.params["topology.num_nodes"] == "1"
    assert record.params["options.reduction"] == "ring"
    assert record.params["options.overlap"] == "true"
    assert record.params["workload.size"] == "17m"
    assert record.params["measurement.timed_steps"] == "10"
    assert record.metrics == {
        "step.median_seconds": 0.1,
        "layout.data": 2,
        "layout.shard": 2,
        "layout.tensor": 1,
        "layout.pipeline": 1,
        "layout.world_size": 2,
        "topology.num_nodes": 1,
        "topology.ranks_per_node": 2,
        "topology.delay_ms": 0,
        "workload.width": 384,
        "training.global_batch_size": 8,
        "parity.ok": 1,
        "parity.finite": 1,
        "parity.loss_max_relative": 1e-15,
        "parity.gradient_norm_max_relative": 2e-15,
        "parity.gradient_max_relative": 3e-15,
        "parity.parameter_max_relative": 4e-15,
        "parity.replicas_bit_equal": 1,
    }
    assert json.loads(record.artifacts["result.json"])["case"]["id"] == CASE.id


def test_params_are_the_same_on_every_repetition():
    first, second = (
        case_record(result(suite_run=run, started=start, duration_seconds=start / 9, metrics={"a": start}), HERE)
        for run, start in (("s1", 100.0), ("s2", 200.0))
    )
    assert first.params == second.params
    assert first.digest != second.digest


def test_the_same_result_gives_the_same_digest_and_a_changed_one_another():
    assert case_record(result(), HERE).digest == case_record(result(), HERE).digest
    assert case_record(result(), HERE).digest != case_record(result(status="failed"), HERE).digest


def test_an_emulated_topology_is_marked():
    assert case_record(result(environment={"emulated": True}), HERE).tags["emulated"] == "true"


def test_how_many_cases_the_suite_has_is_a_tag_where_it_is_known():
    assert case_record(result(num_suite_cases=7), HERE).tags["suite_cases"] == "7"
    assert "suite_cases" not in case_record(result(), HERE).tags


def test_other_work_is_a_tag():
    assert case_record(result(other_work="clipped at 1"), HERE).tags["other_work"] == "clipped at 1"


def test_values_that_are_not_finite_are_named_not_sent():
    parity = dataclasses.replace(PARITY, ok=False, loss_max_relative=math.inf, gradient_max_relative="nan")
    samples = {"losses": [1.0, "nan", 3.0], "reference_losses": [1.0, 2.0, "inf"]}
    record = case_record(result(status="parity failed", parity=parity, samples=samples), HERE)
    assert record.metrics["parity.finite"] == 0
    assert record.metrics["parity.parameter_max_relative"] == 4e-15
    assert not {"parity.loss_max_relative", "parity.gradient_max_relative"} & record.metrics.keys()
    assert (
        record.tags["not_finite"]
        == "parity.loss_max_relative=inf, parity.gradient_max_relative=nan, loss, loss.difference"
    )
    assert record.series == {"loss": [(0, 1.0), (2, 3.0)], "loss.difference": [(0, 0.0)]}
    assert not record.finished
    json.loads(record.artifacts["result.json"], parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def test_the_slowest_rank_is_the_step_and_a_long_series_keeps_its_ends():
    seconds = [[0.5 + step for step in range(1000)], [0.25 + step for step in range(1000)]]
    record = case_record(result(samples={"step_seconds": seconds}), HERE)
    points = record.series["step.seconds"]
    assert len(points) == 50
    assert points[0] == (0, 0.5)
    assert points[-1] == (999, 999.5)
    assert all(value == step + 0.5 for step, value in points)
    assert list(record.series) == ["step.seconds"]


def test_a_long_param_is_cut_with_its_hash():
    texts = ["x" * 20_000 + end for end in "ab"]
    first, second = (
        case_record(result(case=dataclasses.replace(CASE, options={"map": text})), HERE).params["options.map"]
        for text in texts
    )
    assert len(first) == MAX_PARAM_LENGTH
    assert first.startswith("xxx")
    assert first != second


def test_a_metric_of_the_result_wins_over_what_is_derived():
    record = case_record(result(parity=PARITY, metrics={"parity.loss_max_relative": 0.25}), HERE)
    assert record.metrics["parity.loss_max_relative"] == 0.25


@pytest.mark.parametrize(
    ("status", "finished"),
    [("ok", True), ("unsupported", True), ("unavailable", True)]
    + [
        (s, False)
        for s in ("failed", "timed out", "out of memory", "topology mismatch", "bytes mismatch", "parity failed")
    ],
)
def test_only_a_harmless_status_is_finished(status, finished):
    assert case_record(result(status=status), HERE).finished is finished
    record = suite_record("s1", [result(), result(status=status)], None)
    assert record.finished is finished
    assert record.metrics["cases"] == 2
    assert record.metrics[f"cases.{status}"] == (2 if status == "ok" else 1)
    known = result(status=status)
    known = dataclasses.replace(known, case=dataclasses.replace(known.case, expected="parity failed"))
    assert case_record(known, HERE).finished is (finished or status == "parity failed")


def test_suite_runs_are_told_apart_the_latest_last():
    late, early, nameless = result(started=300.0), result(suite_run="s0"), result(suite_run="", started=200.0)
    assert list(suite_runs([late, early, nameless], HERE).items()) == [
        ("s0", [early]),
        ("night", [nameless]),
        ("s1", [late]),
    ]


def test_a_suite_run_with_its_report_and_ratio_table(tmp_path):
    row = {
        "strategy": "ddp",
        "world_size": 2,
        "workload": "/a/mine.py:gpt:size=17m",
        "implementation": "native.ddp transport=shm",
        "best_peer": "torch.ddp",
        "ratio": 0.86,
        "floor_ratio": 1.04,
        "overhead_ratio": None,
        "rounds": 5,
        "spread": "nan",
    }
    (tmp_path / "ratios.json").write_text(json.dumps([row]))
    (tmp_path / "report.md").write_text("# Peers")
    record = suite_record("s1", [result(started=100.0, duration_seconds=5.0), result(started=102.0)], tmp_path)
    name = "ddp native.ddp transport shm world 2 .a.mine.py:gpt:size 17m"
    ratios = {key: value for key, value in record.metrics.items() if "/" in key}
    assert ratios == {f"ratio/{name}": 0.86, f"floor_ratio/{name}": 1.04, f"rounds/{name}": 5}
    assert record.artifacts["report.md"] == record.tags["mlflow.note.content"] == "# Peers"
    assert json.loads(record.artifacts["ratios.json"]) == [row]
    assert (record.started, record.ended) == (100.0, 105.0)
    (tmp_path / "report.md").write_text("x" * 6000)
    assert suite_record("s1", [result()], tmp_path).tags["mlflow.note.content"] == "See the artifact report.md."


def test_a_suite_run_is_named_once():
    assert [suite_record(name, [result(suite="smoke")], None).name for name in ("smoke-1", "night")] == [
        "smoke-1",
        "smoke night",
    ]


def test_a_library_s_version_is_a_param_and_its_noise_an_artifact(tmp_path):
    made = result(environment={"libraries": {"deepspeed": "0.19.8"}})
    logs = logs_of(tmp_path, made.case) / "timed"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("start " + "x" * MAX_LOG_BYTES + " end")
    (logs / "rank-1.log").write_text("\n")
    record = case_record(made, tmp_path)
    assert record.tags["libraries"] == "deepspeed==0.19.8"
    assert record.params["libraries.deepspeed"] == "0.19.8"
    assert record.artifacts.keys() == {"result.json", "logs/timed/rank-0.log"}
    assert len(record.artifacts["logs/timed/rank-0.log"]) == MAX_LOG_BYTES
    assert record.artifacts["logs/timed/rank-0.log"].endswith(" end")
    assert record.digest != case_record(result(environment={"libraries": {"deepspeed": "0.20"}}), tmp_path).digest
