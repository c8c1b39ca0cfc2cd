"""Two levels: the same sums, in fp64 to 1e-12, on nodes of every shape; what leaves a node, counted on real links and
foreseen; and broken ones, which the gate must catch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import implementation as implementations
from harness import models
from harness.layout import Layout
from harness.measure.communication import summarise
from harness.measure.predicted_memory import registry
from harness.placement import seats
from harness.topology import Topology
from harness.traffic import leaving_bytes
from impls.native.ddp import NativeDataParallel
from impls.native.parts import hierarchy
from impls.native.parts.replica_costs import replica_traffic
from tests.conftest import parity_case

if TYPE_CHECKING:
    from tests.conftest import Instrumented, Worlds

MUTANTS = Path(__file__).with_name("hierarchy_mutants.py")
TWO_BY_TWO = Topology(num_nodes=2, ranks_per_node=2)
SCATTERED = Topology(num_nodes=2, ranks_per_node=2, placement="scattered")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("implementation", "kind", "options", "topology"),
    [
        ("native.ddp", "unequal_tokens", {}, TWO_BY_TWO),
        ("native.ddp", "odd_shapes", {"bucket_bytes": 1000}, SCATTERED),
        ("native.ddp", "unused", {"transport": "shared_memory", "bucket_bytes": 1000}, TWO_BY_TWO),
        ("native.ddp", "clipped", {"transport": "shared_memory"}, SCATTERED),
        ("native.zero", "unequal_tokens", {"stage": 1}, TWO_BY_TWO),
        ("native.zero", "odd_shapes", {"stage": 2, "bucket_bytes": 1000}, SCATTERED),
        ("native.zero", "unused", {"stage": 3}, TWO_BY_TWO),
        ("native.zero", "clipped", {"stage": 3, "reshard_after_forward": False}, SCATTERED),
        ("native.zero", "batch_norm", {"stage": 2}, TWO_BY_TWO),
    ],
)
def test_trains_as_one_process_does(
    worlds: Worlds, implementation: str, kind: str, options: dict[str, Any], topology: Topology
) -> None:
    case = parity_case(f"awkward:kind={kind}", implementation, 4, options=options, topology=topology, precision="fp64")
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation
    facts = worlds.adopt(case).command("build")[0]
    assert facts["levels"] == "2 nodes of 2 ranks"
    assert facts["transport"] == options.get("transport", "process_group")


def test_replicas_of_several_nodes_are_summed_in_two_levels(worlds: Worlds) -> None:
    """Shards across nodes, their replicas within."""
    layout = Layout(data=4, shard=1)
    case = parity_case(
        "awkward:kind=odd_shapes",
        "native.zero",
        4,
        layout=layout,
        options={"stage": 2},
        topology=TWO_BY_TWO,
        precision="fp64",
    )
    parity = worlds.parity(case)
    assert parity.ok, parity.explanation
    assert worlds.adopt(case).command("build")[0]["levels"] == "2 nodes of 2 ranks"


@pytest.mark.parametrize(
    ("mutant", "options"),
    [
        ("NotAcross", {}),
        ("NotInside", {}),
        ("NoGatherInside", {}),
        ("ShardsNotAcross", {"stage": 2}),
        ("ShardsOfTheWrongNode", {"stage": 2}),
        ("GathersNotInside", {"stage": 3}),
    ],
)
def test_gate_catches_broken_levels(worlds: Worlds, mutant: str, options: dict[str, Any]) -> None:
    parity = worlds.parity(
        parity_case(
            "awkward:kind=unequal_tokens",
            f"{MUTANTS}:{mutant}",
            4,
            options=options,
            topology=TWO_BY_TWO,
            precision="fp64",
        )
    )
    assert not parity.ok
    assert parity.explanation is not None


@pytest.mark.parametrize(
    ("layout", "topology", "device", "reason"),
    [
        (Layout(data=4), TWO_BY_TWO, "cpu", None),
        (Layout(data=4), SCATTERED, "cpu", None),
        (Layout(data=4), Topology(ranks_per_node=4), "cpu", "the group lies on one node"),
        (Layout(data=4), Topology(num_nodes=4, ranks_per_node=1), "cpu", "a node has one of its ranks"),
        (Layout(data=2, tensor=2), TWO_BY_TWO, "cpu", "a node has one of its ranks"),
        (Layout(data=3, tensor=2), Topology(num_nodes=2, ranks_per_node=3), "cpu", "different numbers of ranks"),
        (Layout(data=4), TWO_BY_TWO, "cuda", "tensors on cuda are reduced by their own library"),
    ],
)
def test_says_why_one_level_does_as_well(layout: Layout, topology: Topology, device: str, reason: str | None) -> None:
    found = hierarchy.flat_because(layout, seats(layout, topology), "data", torch.device(device))
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("implementation", "options"),
    [("native.ddp", {"transport": "shared_memory"}), ("native.zero", {"stage": 2}), ("native.zero", {"stage": 3})],
)
def test_a_rank_sends_as_many_bytes_as_foreseen(
    instrumented: Instrumented, implementation: str, options: dict[str, Any]
) -> None:
    case = parity_case("gpt:size=tiny", implementation, 4, options=options, topology=TWO_BY_TWO)
    launch = instrumented.adopt(case)
    launch.command("build")
    launch.command("warm_up", num_steps=1)
    answers = launch.command("measure_communication", num_steps=1)
    sent = summarise([answer["records"] for answer in answers])["communication.bytes_per_step"]
    kind, workload = implementations.load(implementation), models.load(case.workload)
    assert sent == kind.predicted_wire_bytes(workload, registry(workload), case.layout, case.options)
    across = [event for event in answers[0]["records"][0].events if event.ranks == (0, 2)]
    assert across, "nothing went from node to node"


def test_asked_for_where_it_cannot_be_it_is_told(worlds: Worlds) -> None:
    for implementation in ("native.ddp", "native.zero"):
        case = parity_case("awkward", implementation, 2, options={"hierarchical": "on"})
        facts = worlds.adopt(case).command("build")[0]
        assert facts["hierarchical"] == "off"
        assert facts["hierarchical_fallback"] == "the group lies on one node"


def test_another_reduction_has_no_levels() -> None:
    reason = NativeDataParallel.refused_options({"hierarchical": "on", "reduction": "ring"})
    assert reason == "hierarchical=on is a way of reduction=all_reduce, got reduction=ring"


@pytest.mark.parametrize(
    ("layout", "topology", "flat", "levels"),
    [
        # 2 (W - 1) / W of 1200 bytes against 2 (N - 1) / N; a scattered ring crosses with every message
        (Layout(data=4), TWO_BY_TWO, 1800, 1200),
        (Layout(data=4), SCATTERED, 3600, 1200),
        (Layout(data=8), Topology(num_nodes=2, ranks_per_node=4), 2100, 1200),
        (Layout(data=8), Topology(num_nodes=4, ranks_per_node=2), 2100, 1800),
        (Layout(data=4), Topology(num_nodes=4, ranks_per_node=1), 1800, 1800),
    ],
)
def test_what_leaves_a_node(layout: Layout, topology: Topology, flat: int, levels: int) -> None:
    placed, workload = seats(layout, topology), models.load("gpt:size=tiny")
    for hierarchical, expected in (("off", flat), ("on", levels), ("auto", levels)):
        sent = replica_traffic(1200, workload, layout, placed, hierarchical)  # type: ignore[arg-type]
        assert leaving_bytes(sent, placed) == [expected] * topology.num_nodes
        # A rank sends as much in all, whatever the levels.
        of_rank = sum(num_bytes for (here, _), num_bytes in sent.items() if here == 0)
        assert of_rank == 2 * (layout.data - 1) * 1200 // layout.data
