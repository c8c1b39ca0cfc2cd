"""Collectives by size on real ranks, here and over emulated nodes, as `meshmark links` measures them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import cli, link_table
from harness.launch import emulated
from harness.topology import Topology


def links(*arguments: str) -> int:
    return cli.main(["links", *arguments])


def test_every_operation_between_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.json"
    assert links("--ranks", "2", "--smallest", "1K", "--largest", "64K", "--factor", "64", "--out", str(out)) == 0
    found = link_table.read(out)
    assert [(m.operation, m.payload_bytes) for m in found.measurements] == [
        (operation, size) for operation in link_table.OPERATIONS for size in (1024, 65536)
    ]
    assert (found.topology, found.backend, found.emulated) == (Topology(ranks_per_node=2), "gloo", False)
    assert found.environment["machine_fingerprint"]
    assert all(3 <= len(m.seconds) <= 20 and min(m.seconds) > 0 for m in found.measurements)
    printed = capsys.readouterr()
    assert "busbw GB/s" in printed.out
    assert printed.err.splitlines()[-1] == "[10/10] point_to_point 65,536 bytes"


def test_a_slow_link_is_what_the_bus_carries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = Topology(num_nodes=2, ranks_per_node=1, link_mbits=200.0)
    if reason := emulated.unavailable(topology):
        pytest.skip(reason)
    capsys.readouterr()
    options = ["--ranks", "2", "--nodes", "2", "--link-mbits", "200", "--smallest", "4M", "--largest", "4M", "--json"]
    chosen = ["--operation", "all_reduce", "--operation", "point_to_point"]
    assert links(*options, *chosen, "--out", str(tmp_path / "links.json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == link_table.read(tmp_path / "links.json").to_json()
    assert (told["emulated"], told["topology"]["link_mbits"]) == (True, 200.0)
    all_reduce, both_ways = (measurement["bus_bytes_per_second"] for measurement in told["measurements"])
    assert 20e6 < all_reduce < 28e6  # 25 MB/s, less headers, more by what a burst lets through
    assert 10e6 < both_ways < 28e6  # gloo may send and receive in turn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks: expected at least 2, got 1"),
        (["--smallest", "4Q"], "--smallest: expected a size such as 1024, 4K or 16M, got '4Q'"),
        (["--largest", "1K"], "links: expected sizes from 1 byte up and a factor of at least 2, got 4096 to 1024 by 4"),
        (["--ranks", "3", "--nodes", "2"], "topology: 3 ranks cannot be spread evenly over 2 nodes"),
        (["--link-mbits", "100"], "topology: one node has no link to another"),
        (["--out", "/nowhere/links.json"], "--out /nowhere/links.json: expected a file in a directory that exists"),
        (["--out", "."], "--out .: expected a file in a directory that exists and can be written to"),
        (["--engine", "torchrun"], "--engine torchrun: expected --ranks-per-node of at least 1, got None"),
        (["--operation", "broadcast"], "--operation: expected one of all_reduce, all_gather, "),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert links(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("meshmark: ")
    assert message in said
    assert said.count("\n") == 1
