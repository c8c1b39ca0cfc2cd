from dataclasses import replace
from typing import Any

import pytest

from harness.case import Case, Measurement, Suite
from harness.layout import Layout
from harness.topology import Topology

CASE = Case(
    workload="gpt:size=17m",
    implementation="native.ddp",
    layout=Layout(data=2),
    options={"transport": "shared_memory", "bucket_bytes": 1000},
)


def test_the_id_is_the_same_in_every_session() -> None:
    # Results of past sessions are found by it: whoever changes this breaks their history.
    assert CASE.id == "native.ddp-data2-" + CASE.id[-10:]
    assert Case(workload="gpt", implementation="reference").id == "reference-single-8e0bb0a5b8"


@pytest.mark.parametrize(
    "same",
    [
        {"deadline_seconds": 7.0},
        {"measurement": Measurement(timed_steps=3, rounds=9)},
        {"role": "peer"},
        {"expected": "parity failed"},
        {"options": {"bucket_bytes": 1000, "transport": "shared_memory"}},
        {"topology": Topology(ranks_per_node=2)},
    ],
)
def test_how_it_is_measured_and_written_is_no_part_of_the_id(same: dict[str, Any]) -> None:
    assert replace(CASE, **same).id == CASE.id


def test_what_it_trains_is() -> None:
    others: list[dict[str, Any]] = [
        {"workload": "gpt:size=30m"},
        {"implementation": "torch.ddp"},
        {"layout": Layout(tensor=2)},
        {"topology": Topology(num_nodes=2, ranks_per_node=1)},
        {"topology": Topology(num_nodes=2, ranks_per_node=1, delay_ms=1.0)},
        {"options": {"transport": "shared_memory", "bucket_bytes": 1001}},
        {"options": {}},
        {"precision": "bf16"},
        {"comparison": "zero_1"},
    ]
    ids = [CASE.id, *(replace(CASE, **other).id for other in others)]
    assert len(set(ids)) == len(ids)


def test_an_id_is_a_plain_file_name() -> None:
    name = replace(CASE, implementation="my dir/impl.py:Class", layout=Layout(data=2, tensor=2)).id
    assert "data2-tensor2" in name
    assert not set(name) & set("/ :=")


PARTS = replace(CASE, expected="parity failed")


def test_json_and_back() -> None:
    assert Case.from_json(CASE.to_json()) == CASE, "also where no topology is named: one that is, is emulated"
    placed = replace(CASE, topology=Topology(ranks_per_node=2))
    assert Case.from_json(placed.to_json()) == placed
    assert Case.from_json(CASE.to_json()).id == CASE.id
    named = replace(CASE, comparison="zero_1")
    assert Case.from_json(named.to_json()).comparison == "zero_1"
    assert Case.from_json(PARTS.to_json()).expected == "parity failed"
    later = ("comparison", "expected", "is_unplaced")
    before_there_were_these = {key: value for key, value in CASE.to_json().items() if key not in later}
    assert Case.from_json(before_there_were_these) == CASE
    over_two = replace(CASE, topology=Topology(num_nodes=2, ranks_per_node=1)).to_json()
    del over_two["is_unplaced"]
    assert Case.from_json(over_two).topology == Topology(num_nodes=2, ranks_per_node=1)
    assert Case.from_json(before_there_were_these).id == CASE.id
    assert CASE.label == "native.ddp transport=shared_memory bucket_bytes=1000"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"role": "rival"}, "case: role must be one of subject, peer, floor, reference, got 'rival'"),
        ({"expected": "failed"}, "case: expected must be one of ok, parity failed, got 'failed'"),
        (
            {"expected": "parity failed", "role": "floor"},
            "case: expected 'parity failed' needs a case that is held against the reference, got role floor with "
            "parity_steps 4",
        ),
        (
            {"expected": "parity failed", "measurement": Measurement(parity_steps=0)},
            "case: expected 'parity failed' needs a case that is held against the reference, got role subject with "
            "parity_steps 0",
        ),
        ({"comparison": 3}, "case: comparison must be a name, got 3"),
        ({"layout": "data=2"}, "case: layout must be a Layout, got 'data=2'"),
        ({"deadline_seconds": 0}, "case: deadline_seconds must be a finite number above 0, got 0"),
        ({"deadline_seconds": "60"}, "case: deadline_seconds must be a finite number above 0, got '60'"),
        ({"deadline_seconds": float("inf")}, "case: deadline_seconds must be a finite number above 0, got inf"),
        ({"measurement": {"rounds": 2}}, "case: measurement must be a Measurement, got {'rounds': 2}"),
        ({"topology": Topology(ranks_per_node=3)}, "case: layout data=2 needs 2 ranks, topology 1x3 has 3"),
    ],
)
def test_bad_cases(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        replace(CASE, **values)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"timed_steps": -1}, "measurement: timed_steps must be an integer of at least 0, got -1"),
        ({"rounds": True}, "measurement: rounds must be an integer of at least 0, got True"),
        ({"rounds": 0}, "measurement: timed_steps need at least one round, got rounds 0"),
        ({"parity_steps": 2}, "measurement: parity_steps must be 0 or at least 3, got 2"),
    ],
)
def test_bad_measurements(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        Measurement(**values)
    assert str(raised.value) == message


def test_a_suite_holds_every_case_once() -> None:
    with pytest.raises(ValueError, match="suite 'empty': expected at least one case, got none"):
        Suite(name="empty", cases=())
    with pytest.raises(ValueError, match=r"suite 'twice': the same case twice: native\.ddp"):
        Suite(name="twice", cases=(CASE, replace(CASE, role="peer")))


@pytest.mark.parametrize("name", ["", "a/b", "../up", "two words", "line\n", 3])
def test_a_suite_name_is_one_plain_word(name: Any) -> None:
    assert Suite(name="gpt-17m_v1.2", cases=(CASE,)).name == "gpt-17m_v1.2"
    with pytest.raises(ValueError) as raised:
        Suite(name=name, cases=(CASE,))
    assert str(raised.value) == f"suite: name must be letters, digits, '-', '_' and '.' only, got {name!r}"
