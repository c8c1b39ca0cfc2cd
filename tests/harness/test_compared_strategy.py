"""As which strategy a case is compared, before it is measured as on a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.case import Case
from harness.compared_strategy import compared_as, ours_planned
from harness.layout import Layout
from harness.measured_case import MeasuredCase
from harness.references import References

RIVALS = ("zero_3", "zero_2")
PEER = Case(
    workload="gpt:size=tiny",
    implementation="torch.fsdp",
    layout=Layout(data=2),
    options={"reshard_after_forward": False},
    role="peer",
)


def ours(stage: int, name: str = "native.zero") -> Case:
    return Case(workload="gpt:size=tiny", implementation=name, layout=Layout(data=2), options={"stage": stage})


@pytest.mark.parametrize(
    ("comparison", "ours", "expected"),
    [
        ("", {"zero_2"}, "zero_2"),
        ("", {"zero_2", "zero_3"}, "zero_3"),
        ("", {"data_parallel"}, "zero_3"),
        ("", set(), "zero_3"),
        ("zero_2", {"zero_3"}, "zero_2"),
        ("mine", {"zero_2"}, "zero_2"),
    ],
)
def test_the_name_of_its_comparison_comes_first_then_what_ours_are(
    comparison: str, ours: set[str], expected: str
) -> None:
    case = Case(workload="w", implementation="torch.fsdp", layout=Layout(data=2), comparison=comparison)
    assert compared_as(case, RIVALS, ours) == expected


def test_before_they_have_run_cases_have_the_strategies_of_their_options() -> None:
    assert ours_planned([ours(1), ours(2), PEER, ours(3, "gone.py:Plan")]) == {"zero_1", "zero_2"}


@pytest.mark.parametrize(("beside", "expected"), [([ours(2), PEER], "zero_2"), ([ours(3)], "zero_3"), ([], "zero_3")])
def test_a_case_is_measured_beside_the_textbook_of_what_it_is_compared_as(
    beside: list[Case], expected: str, tmp_path: Path
) -> None:
    measured = MeasuredCase(
        case=PEER,
        scratch=tmp_path,
        logs=tmp_path,
        references=References(tmp_path, tmp_path),
        on_start=lambda: None,
        on_phase=lambda *_: None,
        beside=beside,
    )
    measured.probe()
    assert measured._compared_as() == expected
    assert measured.result("suite", "run").beyond_the_textbook is not None
