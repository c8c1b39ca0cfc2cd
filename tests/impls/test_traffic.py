"""What ranks send to each other in a step, by the closed forms: rank for rank as much as the forms say that know no
receiver; what of it leaves a node, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from harness import models
from harness.implementation import load
from harness.layout import Layout
from harness.measure.predicted_memory import registry
from harness.placement import seats
from harness.topology import Topology
from harness.traffic import Traffic, leaving_bytes

GPT = "gpt:size=tiny,num_micro_batches=2,clip_norm=none"  # norms are left out of traffic
FOUR = Layout(data=4)


def traffic_and_bytes(name: str, layout: Layout, options: dict[str, Any], topology: Topology) -> tuple[Traffic, int]:
    workload, kind = models.load(GPT), load(name)
    parameters = registry(workload)
    sent = kind.predicted_traffic(workload, parameters, layout, seats(layout, topology), options)
    of_rank = kind.predicted_wire_bytes(workload, parameters, layout, options)
    assert sent is not None
    assert of_rank is not None
    return sent, of_rank


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("native.ddp", FOUR, {}),
        ("native.zero", FOUR, {"stage": 1}),
        ("native.zero", Layout(data=4, shard=2), {"stage": 3}),
        ("native.tensor", Layout(tensor=4), {}),
        ("native.pipeline", Layout(pipeline=4), {}),
        ("native.hybrid", Layout(data=2, tensor=2), {}),
        ("torch.ddp", FOUR, {}),
        ("torch.zero", FOUR, {}),
        ("torch.fsdp", Layout(data=4, shard=2), {}),
        ("torch.tensor", Layout(tensor=4), {}),
        ("torch.pipeline", Layout(pipeline=2), {}),
        ("torch.hybrid", Layout(data=2, tensor=2), {}),
        ("torch.hybrid", Layout(data=2, pipeline=2), {}),
        ("deepspeed.zero", FOUR, {"stage": 0}),
        ("deepspeed.zero", FOUR, {"stage": 1}),
        ("deepspeed.zero", FOUR, {"stage": 2}),
        ("deepspeed.zero", FOUR, {"stage": 3}),
        ("fairscale.oss", FOUR, {}),
    ],
    ids=str,
)
def test_the_busiest_rank_sends_what_is_foreseen_of_one(name: str, layout: Layout, options: dict[str, Any]) -> None:
    topology = Topology(num_nodes=2, ranks_per_node=layout.world_size // 2)
    sent, foreseen = traffic_and_bytes(name, layout, options, topology)
    of_ranks = [sum(n for (here, _), n in sent.items() if here == rank) for rank in range(layout.world_size)]
    # Where bytes do not divide evenly each part is rounded up on its own.
    assert abs(max(of_ranks) - foreseen) <= layout.world_size


def test_shards_of_slices_leave_a_node_along_one_axis_only() -> None:
    """Ranks 0 and 1 hold the slices of one replica: with them on one node nothing of a slice's activations leaves it,
    dealt out in turn nothing of the shards does."""
    layout = Layout(data=2, tensor=2)
    inside, of_rank = traffic_and_bytes("torch.hybrid", layout, {}, Topology(num_nodes=2, ranks_per_node=2))
    along_tensor, along_data = inside[0, 1], inside[0, 2]
    assert along_tensor + along_data == of_rank
    assert along_tensor and along_data
    assert leaving_bytes(inside, seats(layout, Topology.of(4, 2))) == [2 * along_data] * 2
    across = seats(layout, Topology.of(4, 2, placement="scattered"))
    assert leaving_bytes(inside, across) == [2 * along_tensor] * 2


def test_owners_bring_their_parameters_to_every_other_node() -> None:
    """Two ranks: each sends half of the sum's ring twice, and what it owns."""
    layout, workload = Layout(data=2), models.load(GPT)
    sent, _ = traffic_and_bytes("fairscale.oss", layout, {}, Topology(num_nodes=2, ranks_per_node=1))
    gradients = sum(parameter.num_bytes for parameter in registry(workload))
    assert sent[0, 1] + sent[1, 0] == 2 * gradients + gradients


def test_reductions_to_owners_have_no_form_from_rank_to_rank() -> None:
    workload = models.load(GPT)
    options = {"stage": 2, "use_multi_rank_bucket_allreduce": False}
    kind = load("deepspeed.zero")
    assert kind.predicted_traffic(workload, registry(workload), FOUR, seats(FOUR, Topology.of(4, 2)), options) is None
