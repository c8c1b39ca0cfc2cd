"""The table of links: nccl-tests' formulas, its file, and what it tells of other sizes."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from harness import link_table
from harness.link_table import OPERATIONS, LinkTable, Measurement
from harness.topology import Topology

MEGABYTE = 1_000_000


def table(*measurements: Measurement, num_ranks: int = 4) -> LinkTable:
    return LinkTable(
        topology=Topology(ranks_per_node=num_ranks),
        backend="gloo",
        emulated=False,
        environment={"machine_fingerprint": "abc"},
        measurements=measurements,
    )


def measured(operation: link_table.Operation, payload_bytes: int, *seconds: float) -> Measurement:
    return Measurement(operation=operation, payload_bytes=payload_bytes, seconds=seconds)


@pytest.mark.parametrize(
    ("operation", "num_ranks", "factor"),
    [
        # nccl-tests, doc/PERFORMANCE.md: an all-reduce over 2, 4, 8 ranks; the others; sendrecv
        ("all_reduce", 2, Fraction(1)),
        ("all_reduce", 4, Fraction(3, 2)),
        ("all_reduce", 8, Fraction(7, 4)),
        ("all_gather", 8, Fraction(7, 8)),
        ("reduce_scatter", 4, Fraction(3, 4)),
        ("all_to_all", 2, Fraction(1, 2)),
        ("point_to_point", 8, Fraction(1)),
    ],
)
def test_bus_bandwidth_by_nccl_tests_formulas(
    operation: link_table.Operation, num_ranks: int, factor: Fraction
) -> None:
    assert link_table.bus_factor(operation, num_ranks) == factor
    one = measured(operation, 8 * MEGABYTE, 0.001, 0.004, 0.002)
    found = table(one, num_ranks=num_ranks)
    assert one.algorithm_bandwidth == pytest.approx(4e9)
    assert found.bus_bandwidth(one) == pytest.approx(4e9 * float(factor))


def test_the_slowest_rank_is_the_repeat() -> None:
    assert link_table.slowest([[1.0, 5.0], [2.0, 3.0], [1.5, 4.0]]) == (2.0, 5.0)


def test_what_lies_between_sizes_is_on_a_line_and_beyond_them_goes_by_bandwidth() -> None:
    found = table(measured("all_reduce", 1000, 1.0), measured("all_reduce", 3000, 2.0), measured("all_gather", 5, 9.0))
    assert found.seconds("all_reduce", 10) == 1.0
    assert found.seconds("all_reduce", 1000) == 1.0
    assert found.seconds("all_reduce", 2000) == 1.5
    assert found.seconds("all_reduce", 3000) == 2.0
    assert found.seconds("all_reduce", 9000) == 6.0
    with pytest.raises(ValueError, match="expected measurements of all_to_all, got none"):
        found.seconds("all_to_all", 5)


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    found = table(*(measured(operation, 4096, 0.5, 0.25) for operation in OPERATIONS))
    path = tmp_path / "links.json"
    link_table.write(found, path)
    assert link_table.read(path) == found
    assert json.loads(path.read_text())["measurements"][0]["bus_bytes_per_second"] == pytest.approx(4096 / 0.375 * 1.5)
    assert [file.name for file in tmp_path.iterdir()] == ["links.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 9}', '{"format": 1, "topology": {}}'])
def test_another_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"links\.json: expected a table of links") as raised:
        link_table.read(path)
    assert "\n" not in str(raised.value)


def test_sizes_from_to_by() -> None:
    assert link_table.sizes_between(1024, 65536, 4) == [1024, 4096, 16384, 65536]
    assert link_table.sizes_between(1000, 3999, 2) == [1000, 2000]
    assert link_table.sizes_between(5, 5, 2) == [5]
    for bad in ((0, 5, 2), (6, 5, 2), (1, 5, 1)):
        with pytest.raises(ValueError, match="links: expected sizes from 1 byte up"):
            link_table.sizes_between(*bad)


def test_the_table_as_text() -> None:
    lines = link_table.lines(table(measured("all_reduce", 8 * MEGABYTE, 0.002)))
    assert lines[0] == "1x4, gloo"
    assert lines[-1].split() == ["all_reduce", "8,000,000", "2000.0", "4.0000", "6.0000"]
