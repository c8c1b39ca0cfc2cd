"""What a slow link costs each strategy: four ranks on one node, on two nodes of two, on four nodes of one, over links
that are unshaped, of 1 Gbit/s and of 200 Mbit/s, on emulated nodes.

The model is small enough for two cores and its messages large enough for the slowest link: gradients of 3.7 MB, and
activations of 0.5 MB at every border. Parity is checked where links are unshaped and nodes have several ranks: neither
a rate nor a node for each rank changes a sum. The bytes that leave a node are judged in every case that has a closed
form of them (harness/node_bytes.py). The one node is emulated as well. `meshmark compare` makes a page of the run. The
message is in `--only '2x2 at 200'` and `--only 1x4`; the rest shows how it grows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from harness.case import Case, Measurement, Role, Suite
from harness.layout import Layout
from harness.topology import Topology

_WORKLOAD = "gpt:size=0.9m,global_batch_size=16"
_IN_STAGES = f"{_WORKLOAD},num_micro_batches=4"
_LINKS_MBITS = (None, 1000.0, 200.0)
_MEASUREMENT = Measurement(
    parity_steps=3, warm_up_steps=3, timed_steps=8, communication_steps=2, memory_steps=0, pipeline_steps=0
)
_SHAPED = replace(_MEASUREMENT, parity_steps=0)

_ALL = Layout(data=4)
_PAIRS = Layout(data=4, shard=2)
_SLICES = Layout(data=2, tensor=2)
_STAGES = Layout(data=2, pipeline=2)

_Member = tuple[Role, str, Layout, Mapping[str, Any]]
_ANYWHERE: tuple[_Member, ...] = (
    ("subject", "native.ddp", _ALL, {}),
    *(("subject", "native.zero", _ALL, {"stage": stage}) for stage in (1, 3)),
    ("subject", "native.tensor", Layout(tensor=4), {}),
    ("subject", "native.pipeline", Layout(pipeline=4), {}),
    ("peer", "torch.ddp", _ALL, {}),
    ("peer", "torch.fsdp", _ALL, {}),
    ("peer", "torch.pipeline", Layout(pipeline=4), {}),
)
_ON_TWO_NODES: tuple[_Member, ...] = (  # at the ends of the range of rates; stage 2 sends what stage 1 does
    ("subject", "native.zero", _ALL, {"stage": 2}),
    ("peer", "torch.tensor", Layout(tensor=4), {}),
    ("peer", "deepspeed.zero", _ALL, {"stage": 3}),
    ("peer", "fairscale.oss", _ALL, {}),
)
_IN_ONE_LEVEL: tuple[_Member, ...] = (
    ("subject", "native.ddp", _ALL, {"hierarchical": "off"}),
    ("subject", "native.zero", _ALL, {"stage": 3, "hierarchical": "off"}),
)
_PRODUCTS: tuple[_Member, ...] = (
    ("subject", "native.zero", _PAIRS, {"stage": 3}),
    ("subject", "native.hybrid", _SLICES, {}),
    ("subject", "native.hybrid", _STAGES, {}),
    ("peer", "torch.fsdp", _PAIRS, {}),
    ("peer", "torch.hybrid", _SLICES, {}),
)


def _case(member: _Member, topology: Topology) -> Case:
    role, implementation, layout, options = member
    return Case(
        workload=_IN_STAGES if layout.pipeline > 1 else _WORKLOAD,
        implementation=implementation,
        layout=layout,
        topology=topology,
        options=options,
        role=role,
        measurement=_MEASUREMENT if topology.link_mbits is None and topology.num_nodes < 4 else _SHAPED,
    )


def _placed(topology: Topology) -> Iterator[Case]:
    """On two nodes of two: whole groups inside nodes, and at the ends the same groups across them."""
    for member in _PRODUCTS:
        role, _, layout, _ = member
        if layout == _PAIRS:
            yield _case(member, replace(topology, placement="shard_group_inside_node"))
        elif layout == _SLICES:
            yield _case(member, replace(topology, placement="tensor_inside_node"))
        else:
            yield _case(member, topology)
        if role == "subject" and _is_end(topology):
            yield _case(member, replace(topology, placement="scattered"))


def _is_end(topology: Topology) -> bool:
    return topology.link_mbits in (_LINKS_MBITS[0], _LINKS_MBITS[-1])


def _cases() -> Iterator[Case]:
    yield Case(workload=_WORKLOAD, implementation="reference", role="reference", measurement=_MEASUREMENT)
    for member in (*_ANYWHERE, *_ON_TWO_NODES, *_IN_ONE_LEVEL, *_PRODUCTS):
        yield _case(member, Topology(ranks_per_node=4))
    for mbits in _LINKS_MBITS:
        two_nodes = Topology(num_nodes=2, ranks_per_node=2, link_mbits=mbits)
        for member in (*_ANYWHERE, *(_ON_TWO_NODES + _IN_ONE_LEVEL if _is_end(two_nodes) else ())):
            yield _case(member, two_nodes)
        yield from _placed(two_nodes)
    for mbits in _LINKS_MBITS:
        for member in _ANYWHERE:
            yield _case(member, Topology(num_nodes=4, ranks_per_node=1, link_mbits=mbits))


suite = Suite(
    name="topologies",
    description="every strategy over emulated nodes with fast and slow links: throughput, bytes, exposed waiting",
    cases=tuple(_cases()),
)
