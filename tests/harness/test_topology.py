from typing import Any

import pytest

from harness.topology import Topology


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (Topology(ranks_per_node=4), "1x4"),
        (Topology(num_nodes=2, ranks_per_node=2, link_mbits=100.0, delay_ms=2.5), "2x2 at 100 Mbit/s +2.5 ms"),
        (Topology(num_nodes=2, ranks_per_node=2, placement="scattered"), "2x2 scattered"),
    ],
)
def test_topologies_that_differ_read_differently(topology: Topology, text: str) -> None:
    assert str(topology) == text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_nodes": 0}, "topology: num_nodes must be a positive integer, got 0"),
        ({"ranks_per_node": 1.5}, r"topology: ranks_per_node must be a positive integer, got 1\.5"),
        ({"link_mbits": 0}, r"topology: link_mbits must be from 1 to 1e\+07, got 0"),
        ({"link_mbits": float("inf")}, r"topology: link_mbits must be from 1 to 1e\+07, got inf"),
        ({"link_mbits": "200"}, r"topology: link_mbits must be from 1 to 1e\+07, got '200'"),
        ({"delay_ms": -1}, "topology: delay_ms must be from 0 to 10000, got -1"),
        ({"delay_ms": float("nan")}, "topology: delay_ms must be from 0 to 10000, got nan"),
        ({"delay_ms": 1e6}, "topology: delay_ms must be from 0 to 10000, got 1000000.0"),
        ({"placement": "random"}, "topology: placement must be one of .*, got 'random'"),
    ],
)
def test_bad_topologies(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**{"ranks_per_node": 2, **values})
