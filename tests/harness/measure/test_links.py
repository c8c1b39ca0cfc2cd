"""What links carry beside what is declared of them."""

from __future__ import annotations

import pytest

from harness.measure.links import carried_mbits, mismatch, one_way_ms, payload_bytes
from harness.topology import Topology


def nodes(**links: float) -> Topology:
    return Topology(num_nodes=2, ranks_per_node=2, **links)  # type: ignore[arg-type]


def test_a_payload_takes_some_tenths_of_a_second_within_bounds() -> None:
    assert payload_bytes(nodes(link_mbits=600.0)) == 10_000_000
    assert payload_bytes(nodes(link_mbits=1.0)) == 2**20
    assert payload_bytes(nodes(link_mbits=1e5)) == 2**26
    assert payload_bytes(nodes()) == 2**24


def test_the_busiest_node_at_the_fastest_repeat_counts() -> None:
    # 4 repeats of 25 MB: at 1 s each the link would carry 200 Mbit/s; the slow ones were disturbed.
    assert carried_mbits([1.0, 1.5, 1.0, 3.0], [100_000_000, 90_000_000]) == pytest.approx(200.0)


def test_one_way_is_half_of_the_shortest_round_trip() -> None:
    assert one_way_ms([0.020, 0.011, 0.5]) == pytest.approx(5.5)


@pytest.mark.parametrize(
    ("topology", "mbits", "delay", "reason"),
    [
        (nodes(link_mbits=200.0), 171.0, 0.1, None),
        (nodes(link_mbits=200.0), 169.0, 0.1, "the link is declared at 200 Mbit/s and carries 169"),
        (nodes(link_mbits=200.0), 240.0, 0.1, "the link is declared at 200 Mbit/s and carries 240"),
        (nodes(), 12.0, 40.0, None),
        (nodes(delay_ms=5.0), 12.0, 6.2, None),
        (nodes(delay_ms=5.0), 12.0, 6.3, "the link is declared with a delay of 5 ms and has 6.30"),
        (nodes(delay_ms=5.0), 12.0, 4.2, "the link is declared with a delay of 5 ms and has 4.20"),
    ],
)
def test_what_differs_by_more_than_a_seventh_is_named(
    topology: Topology, mbits: float, delay: float, reason: str | None
) -> None:
    assert mismatch(topology, mbits, delay) == reason
