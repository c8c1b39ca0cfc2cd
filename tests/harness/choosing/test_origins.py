"""Origins: every machine, version, commit and suite run is named, and nothing that is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.case import Suite
from harness.choosing import origins
from harness.result import Result
from tests.harness.choosing.scenes import DATA_PARALLEL, EVERYTHING, MISSING, PEER, STAGE_1, STAGE_2, result

CPU = {"device": {"kind": "cpu", "name": "a processor"}, "physical_cores": 2, "torch": "2.13.0", "commit": "a" * 40}


def test_a_number_of_cores_that_nobody_could_find_out_is_left_out() -> None:
    unknown = result("native.ddp", environment={**CPU, "physical_cores": None})
    logical = result("native.ddp", environment={**CPU, "physical_cores": None, "logical_cores": 4})
    assert origins.on_machines([unknown]) == ["a processor, torch 2.13.0"]
    assert origins.on_machines([logical]) == ["a processor, 4 cores, torch 2.13.0"]
    nameless = {**CPU, "device": {"kind": "cpu", "name": None}, "torch": None}
    assert origins.on_machines([result("native.ddp", environment=nameless)]) == ["2 cores"]
    assert origins.on_machines([replace(MISSING, environment={})]) == []


def test_all_machines_and_versions_are_named() -> None:
    gpu = {"device": {"kind": "cuda", "name": "a GPU"}, "physical_cores": 64, "torch": "2.14.0"}
    found = [
        *EVERYTHING,
        result("native.ddp", environment={**CPU, "machine_fingerprint": "machine-a", "torch": "2.14.0"}),
        result("native.ddp", environment={**gpu, "machine_fingerprint": "machine-g"}),
        replace(MISSING, environment={"machine_fingerprint": "machine-g"}),
    ]
    assert origins.on_machines(found) == [
        "machine machine-a: a processor, 2 cores, torch 2.13.0 and torch 2.14.0",
        "machine machine-g: a GPU, torch 2.14.0",
    ]


def test_all_commits_are_named() -> None:
    dirty = result("native.ddp", environment={**CPU, "dirty": True})
    assert origins.commits([dirty]) == "commit aaaaaaaaaa with local changes"
    assert origins.commits([*EVERYTHING, dirty]) == "commits 0123456789, aaaaaaaaaa with local changes"
    assert origins.commits([result("native.ddp", environment={**CPU, "commit": None})]) == ""


def test_a_whole_run_needs_no_words_and_a_part_says_where_the_rest_is_from() -> None:
    whole = [replace(one, num_suite_cases=len(EVERYTHING)) for one in EVERYTHING]
    assert origins.completed(EVERYTHING) == origins.completed(whole) == []
    again = replace(STAGE_1, suite_run="sharding-20300102", started=STAGE_1.started + 1, num_suite_cases=11)
    assert origins.completed([again, *whole]) == [
        "suite sharding: 1 case of sharding-20300102, 10 of sharding-20300101"
    ]
    assert origins.completed([again]) == [
        "suite sharding: 1 case of sharding-20300102; 10 cases of the suite were not measured"
    ]
    every = [replace(one, suite_run="sharding-20300103", started=one.started + 2) for one in whole]
    assert origins.completed([again, *whole, *every]) == [], "what was replaced is not on the page"
    other = replace(again, suite="other", num_suite_cases=1)
    assert origins.completed([*whole, other]) == [], "suites stand for themselves"


def test_what_is_no_longer_in_the_suite_makes_up_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(number: int, *members: Result, of: int) -> list[Result]:
        began = DATA_PARALLEL.started + number
        return [replace(one, suite_run=f"r-{number}", started=began, num_suite_cases=of) for one in members]

    # The first run was whole by itself, and so was the second, without that case: it has left the suite.
    found = [*run(1, PEER, of=1), *run(2, DATA_PARALLEL, STAGE_2, of=2), *run(3, STAGE_1, of=4)]
    (told,) = origins.completed(found)
    assert told.endswith("; 1 case of the suite was not measured")
    # As large as before, with another case: which one, the suite at hand says.
    cases = (DATA_PARALLEL.case, STAGE_1.case, STAGE_2.case)
    monkeypatch.setattr(origins.suites, "load", lambda name: Suite(name=name, cases=cases))
    swapped = [*run(1, PEER, DATA_PARALLEL, STAGE_2, of=3), *run(2, DATA_PARALLEL, of=3)]
    (told,) = origins.completed(swapped)
    assert told.endswith("; 1 case of the suite was not measured")
    whole = run(3, *(replace(PEER, case=case) for case in cases), of=3)
    assert origins.completed([*swapped, *whole]) == ["suite sharding: 3 cases of r-3, 1 of r-1"]
