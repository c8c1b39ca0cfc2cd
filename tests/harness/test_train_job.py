"""A suite as a TrainJob: the manifest against the API's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from harness import cli, suites
from harness.submit import Job, limit_seconds
from harness.train_job import name_of

SCHEMA = json.loads(Path(__file__).with_name("train_job_schema.json").read_text())
GIVEN = ["submit", "smoke", "--engine", "kubernetes", "--nodes", "2", "--ranks-per-node", "4"]


def rendered(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert cli.main([*GIVEN, "--results", "/shared/smoke", "--dry-run", *more]) == 0
    content: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    jsonschema.validate(content, SCHEMA)
    return content


def test_the_manifest_is_a_train_job_that_runs_the_suite_in_its_pods(capsys: pytest.CaptureFixture[str]) -> None:
    job = rendered(capsys)
    assert job["metadata"] == {"name": "meshmark-smoke"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert job["spec"]["activeDeadlineSeconds"] == limit_seconds(suites.load("smoke"))
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["command"] == ["python", "-m", "harness"]
    assert trainer["args"] == [
        *("run", "smoke", "--device", "cpu", "--engine", "pods", "--ranks-per-node", "4"),
        *("--results", "/shared/smoke", "--no-upload"),
    ]
    assert "resourcesPerNode" not in trainer
    (key,) = trainer["env"]
    assert key["name"] == "MESHMARK_PODS_KEY"
    assert key["value"] != rendered(capsys)["spec"]["trainer"]["env"][0]["value"], "another one for every job"


def test_on_gpus_each_rank_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--device", "cuda", "--image", "registry.example/meshmark:1", "--runtime", "torch-gpu", "--minutes", "5")
    spec = rendered(capsys, *more)["spec"]
    assert spec["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    assert spec["trainer"]["image"] == "registry.example/meshmark:1"
    assert spec["runtimeRef"] == {"name": "torch-gpu"}
    assert spec["activeDeadlineSeconds"] == 300


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--results", "r"], "expected --dry-run, whose output is for `kubectl apply -f -`; got none"),
        (["--dry-run"], "expected --results, a directory that all pods see; got none"),
        (
            ["--dry-run", "--results", "r", "--partition", "gpu"],
            "expected none of the other engine's options, got --partition",
        ),
    ],
)
def test_what_is_missing_is_one_line(more: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*GIVEN, *more]) == 2
    assert capsys.readouterr().err == f"meshmark: --engine kubernetes: {line}\n"


def test_a_name_is_one_that_kubernetes_takes() -> None:
    job = Job(name="meshmark-My_Suite.2" + "x" * 90, num_nodes=1, ranks_per_node=1, command=["run"],
              directory=Path("r"), limit_seconds=60.0)  # fmt: skip
    assert name_of(job).startswith("meshmark-my-suite-2x")
    assert len(name_of(job)) == 63


@pytest.mark.parametrize(
    ("field", "value"), [("numNodes", "2"), ("command", "python"), ("nodes", 2), ("env", [{"value": "x"}])]
)
def test_the_schema_refuses_what_the_api_does(field: str, value: object, capsys: pytest.CaptureFixture[str]) -> None:
    job = rendered(capsys)
    job["spec"]["trainer"][field] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, SCHEMA)
