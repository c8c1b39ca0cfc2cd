"""Machine, software and commit in words, the same wherever figures are shown."""

from __future__ import annotations

from pathlib import Path

from harness.choosing import origins
from harness.measured_on import commit_of, device_of, measured_on
from harness.provenance import provenance
from harness.result import Result
from tests.harness.choosing.scenes import result

ENVIRONMENT = {
    "device": {"kind": "cpu", "name": "a processor"},
    "physical_cores": 2,
    "logical_cores": 4,
    "threads_per_rank": 1,
    "torch": "2.13.0",
    "commit": "0123456789abcdef",
    "dirty": True,
}


def test_cores_are_told_where_ranks_share_them() -> None:
    assert device_of(ENVIRONMENT) == "a processor, 2 cores (4 logical)"
    assert device_of({**ENVIRONMENT, "logical_cores": 2}) == "a processor, 2 cores"
    assert device_of({**ENVIRONMENT, "physical_cores": None}) == "a processor, 4 cores"
    assert device_of({**ENVIRONMENT, "device": {"kind": "cuda", "name": "a GPU"}}) == "a GPU"
    assert device_of({}) == ""


def test_a_commit_is_told_by_ten_letters() -> None:
    assert commit_of(ENVIRONMENT) == "0123456789 with local changes"
    assert commit_of({**ENVIRONMENT, "dirty": False}) == "0123456789"
    assert commit_of({"dirty": True}) == ""


def test_every_page_says_the_same() -> None:
    found: list[Result] = [result("native.ddp", environment=ENVIRONMENT)]
    machine, commit = "a processor, 2 cores (4 logical)", "0123456789 with local changes"
    assert measured_on(found) == [f"measured on: {machine}, 1 thread(s) a rank, torch 2.13.0"]
    lines = provenance(found, Path("r"))
    assert lines[0] == measured_on(found)[0]
    assert f"commit: {commit}" in lines
    assert origins.on_machines(found) == [f"{machine}, torch 2.13.0"]
    assert origins.commits(found) == f"commit {commit}"


def test_what_is_not_known_is_not_said() -> None:
    assert measured_on([result("native.ddp", environment={"facts": {}})]) == []
