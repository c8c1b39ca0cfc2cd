"""Which suite runs count: the latest of each suite, and those that it leaves cases to."""

from __future__ import annotations

from typing import Any

import pytest

from harness.choosing import sources


def runs_of(suite: str, number: int, cases: str, *, of: int | None = None, machine: str = "m") -> list[dict[str, Any]]:
    """A suite run as a tracker tells of it: a case for each letter."""
    return [
        {
            "started": float(number),
            "params.workload": "gpt:size=17m,num_micro_batches=4",
            "params.precision": "fp32",
            "tags.suite": suite,
            "tags.meshmark.suite_run": f"{suite}-{number}",
            "tags.meshmark.case_id": case,
            **({} if machine == "" else {"tags.machine_fingerprint": machine}),
            **({} if of is None else {"tags.suite_cases": str(of)}),
        }
        for case in cases
    ]


def test_a_whole_run_stands_alone() -> None:
    runs = [*runs_of("s", 1, "abc", of=3), *runs_of("s", 2, "abc", of=3), *runs_of("t", 1, "a", of=1)]
    assert sorted(sources.latest_of_each_suite(runs)) == ["s-2", "t-1"]


def test_a_part_is_completed_back_to_a_whole_run() -> None:
    runs = [
        *runs_of("s", 1, "abc", of=3),
        *runs_of("s", 2, "abc", of=3),
        *runs_of("s", 3, "b", of=3),
        *runs_of("s", 4, "d", of=4),
    ]
    assert sources.latest_of_each_suite(runs) == ["s-4", "s-3", "s-2"]


def test_a_suite_that_has_become_smaller_is_whole() -> None:
    assert sources.latest_of_each_suite([*runs_of("s", 1, "abc", of=3), *runs_of("s", 2, "ab", of=2)]) == ["s-2"]


def test_a_part_is_completed_on_its_own_machine_alone() -> None:
    runs = [
        *runs_of("s", 1, "abc", of=3),
        *runs_of("s", 2, "abc", of=3, machine="other"),
        *runs_of("s", 3, "a", of=3),
    ]
    assert sources.latest_of_each_suite(runs) == ["s-3", "s-1"]


def test_a_run_that_does_not_say_how_many_cases_its_suite_has_is_taken_for_whole() -> None:
    runs = [*runs_of("s", 1, "abc"), *runs_of("s", 2, "ab"), *runs_of("s", 3, "a", of=3)]
    assert sources.latest_of_each_suite(runs) == ["s-3", "s-2"]


def test_a_machine_is_asked_for_by_the_beginning_of_its_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        {**run, "run_id": run["tags.meshmark.suite_run"]}
        for run in (
            *runs_of("s", 1, "abc", of=4, machine="abcdef"),
            *runs_of("s", 1, "d", of=4, machine=""),  # it never started
            *runs_of("s", 2, "abcd", of=4, machine="fedcba"),
        )
    ]
    read: list[str] = []

    def artifacts(run_ids: list[str], name: str) -> dict[str, str]:
        read.extend(run_ids)
        return {}

    monkeypatch.setattr(sources.tracking, "read_artifacts", artifacts)
    sources.from_store(runs)
    sources.from_store(runs, machine="abc")
    assert read == ["s-2"] * 4 + ["s-1"] * 4
    with pytest.raises(
        ValueError, match="--machine x: expected the fingerprint of a machine in MLflow: abcdef, fedcba"
    ):
        sources.from_store(runs, machine="x")
    assert sources.places_of_work(runs) == {("gpt:size=17m", "fp32", "abcdef"), ("gpt:size=17m", "fp32", "fedcba")}


def test_a_run_in_which_nothing_started_is_on_the_machine_of_the_one_before() -> None:
    runs = [
        *runs_of("s", 1, "abc", of=3),
        *runs_of("s", 2, "abc", of=3, machine="other"),
        *runs_of("s", 3, "ab", of=3, machine=""),
    ]
    assert sources.latest_of_each_suite(runs) == ["s-3", "s-2"]
    runs += [*runs_of("s", 4, "a", of=3, machine=""), *runs_of("s", 5, "c", of=3, machine="m")]
    assert sources.latest_of_each_suite(runs) == ["s-5", "s-1"]
    assert sources.latest_of_each_suite(runs_of("s", 1, "a", of=3, machine="")) == ["s-1"]


def test_a_run_in_which_nothing_started_completes_none() -> None:
    runs = [*runs_of("s", 1, "abc", of=3), *runs_of("s", 2, "abc", of=3, machine=""), *runs_of("s", 3, "a", of=3)]
    assert sources.latest_of_each_suite(runs) == ["s-3", "s-1"]
