from dataclasses import replace
from pathlib import Path

import pytest

from harness import suites
from harness.case import Case, Suite
from harness.layout import Layout
from harness.topology import Topology

GOOD = """
from harness.case import Case, Suite
from harness.layout import Layout

suite = Suite(name="mine", cases=tuple(
    Case(workload="gpt", implementation="native.ddp", layout=Layout(data=data)) for data in (2, 4)
))
smaller = Suite(name="smaller", cases=suite.cases[:1])
number = 3
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my_suite.py"
    path.write_text(text)
    return str(path)


def test_loads_the_suite_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert [str(case.layout) for case in suites.load(path).cases] == ["data=2", "data=4"]
    assert suites.load(f"{path}:smaller").name == "smaller"


@pytest.mark.parametrize("name", suites.names())
def test_every_suite_of_the_project_loads_under_its_file_name(name: str) -> None:
    assert suites.load(name).name == name
    assert suites.load(name).description


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("number = 3", "has no 'suite'"),
        ("suite = 3", "suite must be a Suite, got int"),
        ("def suite(:", "my_suite.py, line 1: expected Python, got invalid syntax"),
        ("import no_such_library", "line 1: No module named 'no_such_library'"),
        (GOOD.replace("layout=Layout(data=data)", "layout=data"), "layout must be a Layout, got 2"),
        (GOOD.replace("Layout(data=data)", "Layout(data=0)"), "data must be a positive integer, got 0"),
        (GOOD.replace("workload=", "worklod="), "unexpected keyword argument 'worklod'; Case takes workload, impl"),
        (GOOD.replace("(2, 4)", "()"), "expected at least one case, got none"),
        (GOOD.replace("(2, 4)", "(2, 2)"), "the same case twice: native.ddp, data=2, gpt"),
    ],
)
def test_a_bad_file_is_named_with_what_was_expected_and_given(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=r"my_suite\.py") as caught:
        suites.load(write(tmp_path, text))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_line_of_a_bad_field_is_named(tmp_path: Path) -> None:
    text = "from harness.case import Measurement\n\nmeasurement = Measurement(rounds=-1)\n"
    with pytest.raises(ValueError, match=r"my_suite\.py, line 3: measurement: rounds must be .* got -1"):
        suites.load(write(tmp_path, text))


@pytest.mark.parametrize("text", ["no_such_suite", "no/such/file.py", ""])
def test_what_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        suites.load(text)


def two_layouts() -> Suite:
    options = {"reduction": "ring"}
    return Suite(
        name="s",
        cases=(
            Case(workload="gpt:size=tiny", implementation="native.ddp", layout=Layout(data=2), options=options),
            Case(workload="convnet", implementation="torch.ddp", layout=Layout(data=4)),
        ),
    )


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("native", ["native.ddp"]),
        ("reduction=ring", ["native.ddp"]),
        ("ddp*data=4", ["torch.ddp"]),
        ("convnet fp32", ["torch.ddp"]),
        ("d?p", ["native.ddp", "torch.ddp"]),
    ],
)
def test_a_pattern_selects_cases_by_their_description(pattern: str, chosen: list[str]) -> None:
    selected = suites.select(two_layouts(), pattern)
    assert [case.implementation for case in selected.cases] == chosen
    assert selected.num_left_out == 2 - len(chosen)
    assert suites.select(selected, pattern).num_left_out == 2 - len(chosen), "a part of a part is one of the whole"


def test_a_case_that_names_its_machines_is_described_with_them() -> None:
    slow = Topology(num_nodes=2, ranks_per_node=2, link_mbits=200.0, placement="scattered")
    case = Case(workload="convnet", implementation="torch.ddp", layout=Layout(data=4), topology=slow)
    assert suites.description(case) == "torch.ddp data=4 convnet fp32 2x2 at 200 Mbit/s scattered"
    assert suites.description(replace(case, topology=None)) == "torch.ddp data=4 convnet fp32"


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'fsdp' matches none of the 2 cases of s; the first one reads 'native\.ddp red"
    ):
        suites.select(two_layouts(), "fsdp")
